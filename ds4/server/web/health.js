// What the server is doing and what it has mounted, in the page's head.
import { byId, el } from "./dom.js";
import { askKey } from "./keydialog.js";
import { call } from "./server.js";

const SOON_MS = 2000; // while it is not ready
const LATER_MS = 20000;

/** Look again and again; `named(model)` hears the model's name when it is known. */
export function watchHealth(named) {
  let context = null; // tokens
  let greeted = false;

  async function look() {
    let health = null;
    try {
      health = await (await fetch("/health", { cache: "no-store" })).json();
    } catch {
      // no server, or something else answered
    }
    const ready = health?.status === "ok";
    tell(health, ready);
    if (health?.model) {
      named(health.model);
      mounted(health, context);
    }
    if (ready && !greeted) {
      greeted = true; // before it is answered: a key is asked for once
      void greet(health);
    }
    setTimeout(look, ready ? LATER_MS : SOON_MS);
  }

  /** The context's length; and where the server wants a key, it is asked for now and not after a message was typed. */
  async function greet(health) {
    try {
      const models = await (await call("/v1/models", { askKey })).json();
      context = models.data?.[0]?.context_length ?? null;
      mounted(health, context);
    } catch {
      greeted = false; // the next look, or the first message, says why
    }
  }

  void look();
}

function tell(health, ready) {
  const [words, kind] = wordsOf(health, ready);
  const state = byId("state");
  if (state.textContent !== words) state.textContent = words;
  state.className = `state ${kind}`;
  state.title = health?.error?.message ?? "";
}

function wordsOf(health, ready) {
  if (health === null) return ["not reachable", "bad"];
  if (ready) return ["ready", "good"];
  const { done = 0, total = 0 } = health.progress ?? {};
  const part = total > 0 ? ` ${Math.floor((100 * done) / total)} %` : "";
  if (health.status === "loading") return [`loading${part}`, "busy"];
  if (health.status === "returning") return [`coming back${part}`, "busy"];
  if (health.status === "lent") return [`lent to ${health.lent?.for ?? "another job"}; requests wait`, "busy"];
  return [health.error?.message ?? String(health.status), "bad"];
}

function mounted(health, context) {
  const part = (label, value, about) => el("div", {}, el("dt", {}, label), el("dd", { title: about ?? null }, value));
  const sidecar = (one) => one?.name ?? "none";
  const { zchain = null, posttrain = null } = health.sidecars ?? {};
  const told = [
    part("Base", health.model),
    part("Domain", sidecar(zchain), zchain?.fingerprint),
    part("Post-training", sidecar(posttrain), posttrain?.fingerprint),
  ];
  if (context !== null) told.push(part("Context", `${context.toLocaleString("en-GB")} tokens`));
  byId("mounted").replaceChildren(...told);
}
