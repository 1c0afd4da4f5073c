// A turn of a chat on the page, and what is said below it.
import { copyButton, el } from "./dom.js";
import { Growing } from "./markdown.js";

const ENDS = { length: "The answer ended at its token limit, or at the end of the context." };
const EMPTY = "The model ended its answer without a word.";
const STATES = {
  cut: "This answer was cut off: the page or the connection went away while it was written.",
  stopped: "You stopped this answer.",
};

/** One turn. `actions`: {retry, resume, edit}, called with the turn. */
export class TurnView {
  constructor(turn, actions) {
    this.turn = turn;
    this.text = el("div", { class: turn.role === "user" ? "text plain" : "text" });
    this.thought = el("div", { class: "plain" });
    this.summary = el("summary");
    this.reasoning = el("details", { class: "reasoning", hidden: true }, this.summary, this.thought);
    this.notice = el("p", { class: "notice", hidden: true });
    this.stats = el("p", { class: "stats", hidden: true });
    const button = (label, about, act) => el("button", { type: "button", class: "small", "aria-label": about, onclick: act }, label);
    this.retry = button("Again", "Write this answer again", () => actions.retry(turn));
    this.resume = button("Continue", "Continue this answer", () => actions.resume(turn));
    this.edit = button("Edit", "Edit this message", () => actions.edit(turn));
    this.edit.classList.add("edit");
    this.copy = copyButton(() => turn.text, "Copy", turn.role === "user" ? "Copy this message" : "Copy this answer");
    this.buttons = el("div", { class: "buttons" }, this.copy, this.edit, this.resume, this.retry);
    const who = turn.role === "user" ? "You" : "Answer";
    this.node = el("article", { class: `turn ${turn.role}`, "aria-label": who },
      this.reasoning, this.text, this.notice, this.stats, this.buttons);
    this.growing = new Growing(this.text);
    this.shownThought = 0;
    this.waiting = 0;
    this.cost = 0;
  }

  /** Draw it soon: not more often than drawing allows. */
  soon(after = () => {}) {
    if (this.waiting) return;
    this.waiting = setTimeout(() => {
      this.waiting = 0;
      this.draw(this.last);
      after();
    }, Math.min(1000, Math.max(40, 4 * this.cost)));
  }

  /** Draw it as it is. `last`: no turn follows, so that it may be answered anew. */
  draw(last) {
    const { turn } = this;
    const begun = performance.now();
    this.last = last;
    const writing = turn.state === "writing";
    this.node.setAttribute("aria-busy", String(writing));
    this.node.classList.toggle("writing", writing);
    if (turn.role === "user") this.text.textContent = turn.text;
    else this.growing.show(turn.text);
    this.drawThought(writing);
    const empty = turn.state === "done" && !turn.text && turn.reason !== "length" ? EMPTY : "";
    const said = turn.error ?? STATES[turn.state] ?? ENDS[turn.reason] ?? empty;
    this.notice.textContent = said;
    this.notice.hidden = writing || !said;
    this.notice.classList.toggle("bad", Boolean(turn.error));
    this.stats.textContent = turn.stats ?? "";
    this.stats.hidden = writing || !turn.stats;
    const answer = turn.role === "assistant";
    const broken = turn.state === "cut" || turn.state === "stopped" || turn.reason === "length";
    this.buttons.hidden = writing;
    this.copy.hidden = !turn.text;
    this.edit.hidden = answer;
    this.retry.hidden = !answer || !last;
    this.resume.hidden = !answer || !last || !broken || !turn.text;
    this.cost = performance.now() - begun;
  }

  drawThought(writing) {
    const { turn } = this;
    const thought = turn.reasoning ?? "";
    this.reasoning.hidden = !thought;
    if (thought.length < this.shownThought) {
      this.thought.textContent = "";
      this.shownThought = 0;
    }
    if (thought.length > this.shownThought) this.thought.append(thought.slice(this.shownThought));
    this.shownThought = thought.length;
    const seconds = turn.thoughtS;
    const took = seconds === undefined ? "" : seconds < 1 ? " for less than a second" : ` for ${number(seconds)} s`;
    this.summary.textContent = writing && !turn.text ? "Thinking…" : `Thought${took}`;
  }
}

const number = (n, digits = 0) => n.toLocaleString("en-GB", { maximumFractionDigits: digits, minimumFractionDigits: digits });

/** What the server counted of an answer, in one line. `times`: {read, first, last} in ms since it was asked. */
export function statsOf(usage, times) {
  const parts = [];
  const tokens = usage.completion_tokens;
  if (typeof tokens === "number") {
    const thought = usage.completion_tokens_details?.reasoning_tokens ?? 0;
    parts.push(`${number(tokens)} ${tokens === 1 ? "token" : "tokens"}${thought ? ` (${number(thought)} of reasoning)` : ""}`);
    const seconds = (times.last - times.first) / 1000;
    if (tokens > 1 && seconds >= 0.05) parts.push(`${number((tokens - 1) / seconds, 1)} tokens/s`);
  }
  const { tokens_per_round: per, acceptance_by_position: accepted } = usage.decode ?? {};
  if (typeof per === "number") parts.push(`${number(per, 2)} tokens a pass`);
  if (Array.isArray(accepted) && accepted.some((a) => typeof a === "number")) {
    const shown = accepted.map((a) => (typeof a === "number" ? number(100 * a) : "–"));
    parts.push(`drafts accepted ${shown.join(", ")} %`);
  }
  if (typeof usage.prompt_tokens === "number") {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const read = times.read ? ` in ${number(times.read / 1000, 1)} s` : "";
    parts.push(`prompt ${number(usage.prompt_tokens)} tokens${cached ? ` (${number(cached)} kept from before)` : ""}${read}`);
  }
  return parts.join(" · ");
}
