// The server's API: the key, refusals in plain words, and events of a stream.

const KEY = "ds4.key"; // sessionStorage: this tab's, gone with it

/** What the server, or the way to it, refused. `retryS`: when it may be tried again; null: not by itself. */
export class Refused extends Error {
  constructor(message, { status = 0, code = null, retryS = null } = {}) {
    super(message);
    Object.assign(this, { status, code, retryS });
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

let asking = null; // the dialog that is open: several requests may be refused at once

/** A request. Where the key is missing or wrong `askKey(why)` gets one, or null: then it stays refused. */
export async function call(path, { method = "GET", body = null, signal = null, askKey = null } = {}) {
  for (;;) {
    const used = key.get();
    const response = await send(path, method, body, signal, used);
    if (response.ok) return response;
    const refused = await refusal(response);
    if (refused.status !== 401 || !askKey) throw refused;
    if (key.get() !== used) continue; // another request has got one meanwhile
    asking ??= askKey(used === null ? "This server asks for a key." : "The server did not take this key.");
    const given = await asking.finally(() => (asking = null));
    if (given === null) throw refused;
    key.set(given);
  }
}

async function send(path, method, body, signal, used) {
  const headers = { Accept: "application/json, text/event-stream" };
  if (body !== null) headers["Content-Type"] = "application/json";
  if (used !== null) headers.Authorization = `Bearer ${used}`;
  try {
    return await fetch(path, {
      method, headers, signal, cache: "no-store", body: body === null ? null : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer. Is it running, and can this machine reach it?", { code: "unreachable" });
  }
}

async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // something between this page and the server answered
  }
  const after = Number(response.headers.get("Retry-After"));
  return refused(error, response.status, Number.isFinite(after) && after > 0 ? after : null);
}

/** The server's error object in words for people. `status` 0: it came in the middle of a stream. */
export function refused(error, status, retryS = null) {
  const said = typeof error.message === "string" ? error.message : `it answered ${status} without a reason`;
  const code = error.code ?? null;
  const told = (words, again = null) => new Refused(words, { status, code, retryS: again });
  if (code === "context_length_exceeded") {
    return told(`This chat has become too long for the model: ${said}. Begin a new chat, or shorten your message.`);
  }
  if (status === 401) return told("The server asks for a key, and has got none that it takes.");
  if (status === 413) return told(`This is more than the server reads at once: ${said}.`);
  if (status === 503 || (status === 0 && code === "shutting_down")) {
    return told(`The server cannot answer right now: ${said}.`, retryS ?? (status === 503 ? 5 : null));
  }
  if (status === 404) return told(`Not found: ${said}.`);
  if (status >= 400 && status < 500) return told(`The server did not take the request: ${said}.`);
  return told(`The server failed: ${said}.`);
}

/** Objects of an event stream, as they come. A stream that ends before [DONE] was cut. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw cut();
      }
      if (part.done) throw cut();
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // a comment that says the server is alive, or an empty line
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const cut = () => new Refused("The connection ended in the middle of the answer.", { code: "cut" });
