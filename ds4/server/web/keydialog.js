// The dialog that asks for the server's key.
import { byId } from "./dom.js";

/** A key, or null where nobody gave one. */
export function askKey(why) {
  const dialog = byId("key-dialog");
  const field = byId("key");
  byId("key-why").textContent = why;
  field.value = "";
  return new Promise((resolve) => {
    let given = null;
    const submit = (event) => {
      event.preventDefault();
      given = field.value.trim();
      if (given) dialog.close();
    };
    const cancel = () => dialog.close();
    byId("key-form").addEventListener("submit", submit);
    byId("key-cancel").addEventListener("click", cancel);
    dialog.addEventListener("close", () => {
      byId("key-form").removeEventListener("submit", submit);
      byId("key-cancel").removeEventListener("click", cancel);
      field.value = "";
      resolve(given || null);
    }, { once: true });
    dialog.showModal();
    field.focus();
  });
}
