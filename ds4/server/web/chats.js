// The list of kept chats.
import { byId, el } from "./dom.js";
import { listChats, removeChat } from "./store.js";

/** Show the list; `open(id)` is called with the chat to show, null for a new one where the present one was deleted. */
export function openChats(current, open) {
  const dialog = byId("chats-dialog");
  let gone = false;

  function draw() {
    const kept = listChats();
    byId("chats-clear").disabled = !kept.length;
    const rows = kept.map((chat) =>
      el("li", {},
        el("button", { type: "button", class: "title", "aria-current": chat.id === current ? "true" : null, onclick: () => pick(chat.id) },
          chat.title, el("time", { datetime: new Date(chat.at).toISOString() }, new Date(chat.at).toLocaleString())),
        el("button", { type: "button", class: "small", "aria-label": `Delete: ${chat.title}`, onclick: () => remove([chat.id]) }, "Delete")));
    byId("chats-list").replaceChildren(...(rows.length ? rows : [el("li", { class: "empty" }, "None yet.")]));
  }

  function pick(id) {
    gone = false;
    dialog.close();
    open(id);
  }

  function remove(ids) {
    ids.forEach(removeChat);
    gone ||= ids.includes(current);
    draw();
    byId("chats-close").focus();
  }

  byId("chats-clear").onclick = () => remove(listChats().map((c) => c.id));
  byId("chats-close").onclick = () => dialog.close();
  dialog.onclose = () => gone && open(null);
  draw();
  dialog.showModal();
}
