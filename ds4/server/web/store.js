// What outlives a reload: chats and settings, in this browser's storage and nowhere else.

const CHAT = "ds4.chat.";
const SETTINGS = "ds4.settings";
const CURRENT = "ds4.current"; // sessionStorage: which chat this tab shows

export const DEFAULTS = {
  system: "", temperature: "", top_p: "", max_tokens: "", seed: "", effort: "none", effort_number: "50",
};

function read(storage, name) {
  try {
    return JSON.parse(storage.getItem(name));
  } catch {
    return null; // storage is switched off, or somebody else wrote there
  }
}

export function loadSettings() {
  const kept = read(localStorage, SETTINGS);
  const out = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) if (typeof kept?.[name] === "string") out[name] = kept[name];
  return out;
}

export function saveSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // they hold for this page only, then
  }
}

export function newChat() {
  const random = crypto.getRandomValues(new Uint32Array(3));
  return { id: [...random].map((n) => n.toString(36)).join(""), at: Date.now(), turns: [] };
}

const isTurn = (t) => (t?.role === "user" || t?.role === "assistant") && typeof t.text === "string";

/** A kept chat. An answer that was being written when the page went is marked as cut. */
export function loadChat(id) {
  const kept = read(localStorage, CHAT + id);
  if (!kept || typeof kept.at !== "number" || !Array.isArray(kept.turns)) return null;
  const turns = kept.turns.filter(isTurn).map((t) => (t.state === "writing" ? { ...t, state: "cut" } : t));
  return { id, at: kept.at, turns };
}

/** The chat that this tab showed before a reload; null: a new tab. */
export function currentChat() {
  try {
    const id = sessionStorage.getItem(CURRENT);
    return id === null ? null : loadChat(id);
  } catch {
    return null;
  }
}

export function makeCurrent(chat) {
  try {
    sessionStorage.setItem(CURRENT, chat.id);
  } catch {
    // the next reload begins a new chat
  }
}

/** Keep a chat. Where the storage is full the oldest others go; false: it cannot be kept at all. */
export function saveChat(chat) {
  if (!chat.turns.length) return true;
  const text = JSON.stringify({ at: chat.at, turns: chat.turns });
  const others = listChats().filter((c) => c.id !== chat.id);
  for (;;) {
    try {
      localStorage.setItem(CHAT + chat.id, text);
      return true;
    } catch {
      const oldest = others.pop();
      if (!oldest) return false;
      removeChat(oldest.id);
    }
  }
}

export const removeChat = (id) => localStorage.removeItem(CHAT + id);
export const isChatKey = (name, id) => name === CHAT + id;

/** Kept chats, newest first: {id, at, title}. */
export function listChats() {
  const out = [];
  try {
    for (let i = 0; i < localStorage.length; i += 1) {
      const name = localStorage.key(i);
      if (!name.startsWith(CHAT)) continue;
      const chat = loadChat(name.slice(CHAT.length));
      if (chat) out.push({ id: chat.id, at: chat.at, title: titleOf(chat) });
    }
  } catch {
    return out;
  }
  return out.sort((a, b) => b.at - a.at);
}

function titleOf(chat) {
  const text = chat.turns.find((t) => t.role === "user")?.text.trim().replaceAll(/\s+/g, " ") ?? "";
  const letters = [...text];
  return letters.length > 60 ? `${letters.slice(0, 60).join("")}…` : text || "Without a question";
}

/** The settings as fields of a request; what is left empty is the server's to choose. */
export function fieldsOf(settings) {
  const out = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (settings[name].trim() !== "") out[name] = Number(settings[name]);
  }
  if (settings.effort === "number") out.reasoning_effort = Number(settings.effort_number);
  else if (settings.effort !== "none") out.reasoning_effort = settings.effort;
  return out;
}
