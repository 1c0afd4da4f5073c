// The chat page: what is asked, how its answer comes, and what is kept of both.
import { openChats } from "./chats.js";
import { byId, el } from "./dom.js";
import { watchHealth } from "./health.js";
import { askKey } from "./keydialog.js";
import { Refused, call, events, refused } from "./server.js";
import { SettingsDialog } from "./settings.js";
import { currentChat, fieldsOf, isChatKey, loadChat, makeCurrent, newChat, saveChat } from "./store.js";
import { TurnView, statsOf } from "./turns.js";

const MOST_RETRIES = 5; // of a server that says when to come again
const SAVE_MS = 400;

const log = byId("log");
const ask = byId("ask");
const settings = new SettingsDialog();
const views = new Map();
let chat = currentChat() ?? newChat();
let running = null; // {turn, control}: the answer that is being written
let editing = null; // the message that is replaced by the next one
let stick = true; // the end of the chat stays in sight
let saving = 0;
let model = "";
let leaving = false; // the page may be about to go: requests that break off now were not refused by anybody

const say = (words) => (byId("said").textContent = words);

// -- the chat on the page --

function drawChat() {
  views.clear();
  log.replaceChildren();
  if (!chat.turns.length) log.append(el("p", { class: "empty" }, "Ask something."));
  for (const turn of chat.turns) addView(turn);
  redraw();
  stick = true;
  follow();
}

function addView(turn) {
  log.querySelector(".empty")?.remove();
  const view = new TurnView(turn, {
    retry: (t) => again(t), resume: (t) => void run(t, true), edit: (t) => edit(t),
  });
  views.set(turn, view);
  log.append(view.node);
  return view;
}

function redraw() {
  for (const turn of chat.turns) views.get(turn).draw(turn === chat.turns.at(-1));
}

function follow() {
  if (stick) log.scrollTop = log.scrollHeight;
}

log.addEventListener("scroll", () => {
  stick = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
});

function keep() {
  clearTimeout(saving);
  saving = 0;
  if (!saveChat(chat)) say("This chat cannot be kept: the browser's storage is full or switched off.");
}

function keepSoon() {
  saving ||= setTimeout(keep, SAVE_MS);
}

function show(other) {
  if (running) return;
  chat = other;
  makeCurrent(chat);
  leaveEdit();
  drawChat();
  ask.focus();
}

// -- asking --

function messagesFor(turn, resume, thinking) {
  const out = [];
  if (settings.values.system.trim()) out.push({ role: "system", content: settings.values.system });
  for (const t of chat.turns) {
    if (t === turn) break;
    if (t.text) out.push({ role: t.role, content: t.text });
  }
  if (resume) {
    // an assistant's message without its end of sentence: the model goes on in it
    const part = { role: "assistant", content: turn.text, wo_eos: true };
    if (thinking && turn.reasoning) part.reasoning_content = turn.reasoning;
    out.push(part);
  }
  return out;
}

function send() {
  const text = ask.value;
  if (running || !text.trim()) return;
  if (!settings.valid()) return;
  if (editing) {
    for (const gone of chat.turns.splice(chat.turns.indexOf(editing))) {
      views.get(gone).node.remove();
      views.delete(gone);
    }
    leaveEdit();
  }
  ask.value = "";
  fit();
  const turn = { role: "assistant", text: "", state: "writing" };
  for (const t of [{ role: "user", text }, turn]) {
    chat.turns.push(t);
    addView(t);
  }
  stick = true;
  void run(turn, false);
}

function again(turn) {
  if (running || !settings.valid()) return;
  const fresh = { role: "assistant", text: "", state: "writing" };
  chat.turns[chat.turns.indexOf(turn)] = fresh;
  views.get(turn).node.remove();
  views.delete(turn);
  addView(fresh);
  void run(fresh, false);
}

function edit(turn) {
  if (running) return;
  editing = turn;
  byId("editing").hidden = false;
  ask.value = turn.text;
  fit();
  ask.focus();
}

function leaveEdit() {
  if (editing) ask.value = "";
  editing = null;
  byId("editing").hidden = true;
  fit();
}

/** Have the model write `turn`, or write on in it. */
async function run(turn, resume) {
  if (running || !settings.valid()) return;
  const fields = fieldsOf(settings.values);
  const body = {
    model, messages: messagesFor(turn, resume, "reasoning_effort" in fields), ...fields,
    stream: true, stream_options: { include_usage: true }, return_progress: true,
  };
  running = { turn, control: new AbortController() };
  for (const name of ["error", "reason", "stats"]) delete turn[name];
  turn.state = "writing";
  chat.at = Date.now();
  makeCurrent(chat);
  showRunning(true);
  redraw();
  follow();
  keep();
  say("Waiting for the answer");
  try {
    await attempts(turn, body, running.control.signal);
    turn.state = "done";
    say("The answer is complete");
  } catch (error) {
    if (leaving) {
      keep(); // as one that is being written: the page that comes next says that it was cut
      await new Promise((go) => setTimeout(go, 3000));
    }
    const stopped = error.name === "AbortError";
    turn.state = stopped ? "stopped" : turn.text || turn.reasoning ? "cut" : "failed";
    if (!stopped && error.code !== "cut") turn.error = error instanceof Refused ? error.message : `This page failed: ${error.message}`;
    if (!stopped && !(error instanceof Refused)) console.error(error);
    say(stopped ? "Stopped" : turn.error ?? error.message);
  }
  running = null;
  reading(null);
  showRunning(false);
  redraw();
  follow();
  keep();
}

/** Ask; ask again where the server says when, until a part of the answer has come. */
async function attempts(turn, body, signal) {
  for (let tries = 0; ; tries += 1) {
    const had = turn.text.length + (turn.reasoning ?? "").length;
    try {
      await stream(turn, body, signal);
      return;
    } catch (error) {
      const wrote = turn.text.length + (turn.reasoning ?? "").length > had;
      if (!(error instanceof Refused) || error.retryS === null || wrote || tries >= MOST_RETRIES) throw error;
      say(error.message);
      const until = performance.now() + 1000 * error.retryS;
      for (let left = error.retryS; left > 0; left = (until - performance.now()) / 1000) {
        reading({ words: `${error.message} Trying again in ${Math.ceil(left)} s.` });
        await pause(Math.min(1000, 1000 * left), signal);
      }
    }
  }
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}

async function stream(turn, body, signal) {
  reading({ words: "Waiting for the server…" });
  const view = views.get(turn);
  const asked = performance.now();
  const times = { read: 0, first: 0, last: 0 };
  const thoughtFrom = { at: 0 };
  const response = await call("/v1/chat/completions", { method: "POST", body, signal, askKey });
  for await (const event of events(response)) {
    if (event.error) throw refused(event.error, 0);
    if (event.prompt_progress) {
      const p = event.prompt_progress;
      reading({ done: p.processed, total: p.total, cached: p.cache, ms: p.time_ms });
      continue;
    }
    if (event.usage) turn.stats = statsOf(event.usage, times);
    const choice = event.choices?.[0];
    if (!choice) continue;
    if (choice.finish_reason) turn.reason = choice.finish_reason;
    const { content, reasoning_content: thought } = choice.delta ?? {};
    if (!content && !thought) continue;
    const now = performance.now();
    if (!times.first) {
      Object.assign(times, { first: now, read: now - asked });
      reading(null);
      say("The answer begins");
    }
    times.last = now;
    if (thought) {
      thoughtFrom.at ||= now;
      turn.reasoning = (turn.reasoning ?? "") + thought;
    }
    if (content) {
      if (thoughtFrom.at && !turn.text) turn.thoughtS = (now - thoughtFrom.at) / 1000;
      turn.text += content;
    }
    view.soon(follow);
    keepSoon();
  }
}

// -- below the chat --

/** What is shown while nothing is written yet: {words}, or how far the prompt is read; null: nothing. */
function reading(told) {
  byId("reading").hidden = told === null;
  if (told === null) return;
  const bar = byId("reading-bar");
  bar.hidden = told.total === undefined;
  if (told.total === undefined) {
    byId("reading-text").textContent = told.words;
    return;
  }
  bar.max = Math.max(1, told.total);
  bar.value = told.done;
  const n = (x) => x.toLocaleString("en-GB", { maximumFractionDigits: 0 });
  const rate = told.ms > 0 ? (told.done - told.cached) / (told.ms / 1000) : 0;
  const left = rate > 0 ? `, ${n(rate)} tokens/s, ${n(Math.ceil((told.total - told.done) / rate))} s left` : "";
  const cached = told.cached ? `, ${n(told.cached)} kept from before` : "";
  byId("reading-text").textContent = `Reading the prompt: ${n(told.done)} of ${n(told.total)} tokens${cached}${left}`;
}

function showRunning(on) {
  const [send, stop] = [byId("send"), byId("stop")];
  const focused = document.activeElement;
  send.hidden = on;
  stop.hidden = !on;
  for (const id of ["new", "chats"]) byId(id).disabled = on;
  log.classList.toggle("busy", on);
  if (on && focused === send) stop.focus();
  // what had the focus is gone: a button of the turn, or Stop
  if (!on && (focused === stop || focused === document.body)) ask.focus();
  if (on && (focused === document.body || log.contains(focused))) stop.focus();
}

function fit() {
  ask.style.height = "auto";
  ask.style.height = `${Math.min(ask.scrollHeight + 2, window.innerHeight / 3)}px`;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
ask.addEventListener("input", fit);
ask.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // composing: Enter picks a character
  event.preventDefault();
  if (running) say("An answer is being written. Esc stops it.");
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (running) running.control.abort();
  else if (editing) leaveEdit();
});
byId("stop").addEventListener("click", () => running?.control.abort());
byId("edit-cancel").addEventListener("click", () => {
  leaveEdit();
  ask.focus();
});
byId("new").addEventListener("click", () => show(newChat()));
byId("chats").addEventListener("click", () => openChats(chat.id, (id) => show((id && loadChat(id)) || newChat())));
window.addEventListener("beforeunload", () => {
  leaving = true;
  setTimeout(() => (leaving = false), 3000); // it stayed: a download, say
});
window.addEventListener("pagehide", () => running && keep());
window.addEventListener("storage", (event) => {
  if (running || !isChatKey(event.key, chat.id)) return; // another tab wrote in this chat
  chat = loadChat(chat.id) ?? newChat();
  leaveEdit();
  drawChat();
});

drawChat();
fit();
if (!matchMedia("(pointer: coarse)").matches) ask.focus();
watchHealth((name) => (model = name));
