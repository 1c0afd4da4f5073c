// Markdown of answers as elements. What a model writes is never parsed as HTML: tags are shown as they are written,
// images are not fetched, links lead to http and https only. Time is linear in the text, nesting is bounded.
import { copyButton, el } from "./dom.js";

const MOST_NESTED = 12; // quotes and lists in each other; deeper ones are text
const MOST_MARKS = 32; // emphasis in each other
const MOST_URL = 2000;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]|$)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const ENTITIES = { lt: "<", gt: ">", amp: "&", quot: '"', apos: "'", nbsp: "\u00a0", "#39": "'" };

/** Elements of a whole text. */
export function render(text) {
  return fill(document.createDocumentFragment(), blocks(lines(text), 0).map((b) => b.node));
}

/** A box with a text that grows at its end. What cannot change any more stays as it is drawn. */
export class Growing {
  constructor(box) {
    this.box = box;
    this.fixed = 0; // characters before the blocks that may still change
    this.open = []; // their elements
  }

  show(text) {
    const found = blocks(lines(text.slice(this.fixed)), 0);
    for (const node of this.open) node.remove();
    fill(this.box, found.map((b) => b.node));
    // a line that is not complete may turn out to belong to the block before it: the last two stay open
    const kept = Math.max(0, found.length - 2);
    this.open = found.slice(kept).map((b) => b.node);
    if (found.length) this.fixed += found[kept].at;
  }
}

/** One by one: a call takes no hundred thousand arguments. */
function fill(parent, children) {
  for (const child of children) parent.append(child);
  return parent;
}

/** Lines with the place where each begins. */
function lines(text) {
  let at = 0;
  return text.split("\n").map((line) => {
    const made = { at, text: line.replaceAll("\r", "").replaceAll("\t", "    ") };
    at += line.length + 1;
    return made;
  });
}

const blank = (line) => line.text.trim() === "";
const indent = (line) => line.text.length - line.text.trimStart().length;

function isRule(text) {
  const marks = text.replaceAll(" ", "");
  return marks.length >= 3 && "-*_".includes(marks[0]) && [...marks].every((c) => c === marks[0]) && !text.startsWith("    ");
}

/** Whether a line begins something that ends a paragraph. */
function begins(line) {
  const t = line.text;
  return FENCE.test(t) || HEADING.test(t) || isRule(t) || /^ {0,3}>/.test(t) || /^ {0,3}(?:[-*+]|1[.)])(?: |$)/.test(t);
}

/** Blocks of `all`: {at, node} in order. */
function blocks(all, depth) {
  const out = [];
  for (let i = 0; i < all.length; ) {
    if (blank(all[i])) {
      i += 1;
      continue;
    }
    const [node, next] = block(all, i, depth);
    out.push({ at: all[i].at, node });
    i = next;
  }
  return out;
}

/** The block that begins at line `i`, and the line after it. */
function block(all, i, depth) {
  const text = all[i].text;
  const fence = FENCE.exec(text);
  if (fence && !(fence[1][0] === "`" && text.slice(fence[0].length).includes("`"))) return code(all, i, fence);
  const heading = HEADING.exec(text);
  if (heading) {
    const made = el(`h${Math.min(6, heading[1].length + 2)}`); // h1 and h2 are the page's
    inline(made, trimHashes(text.slice(heading[0].length)));
    return [made, i + 1];
  }
  if (isRule(text)) return [el("hr"), i + 1];
  if (depth < MOST_NESTED) {
    if (/^ {0,3}>/.test(text)) return quote(all, i, depth);
    if (ITEM.test(text)) return list(all, i, depth);
  }
  const head = headOfTable(all, i);
  if (head) return table(all, i, head);
  let end = i + 1;
  while (end < all.length && !blank(all[end]) && !begins(all[end]) && !headOfTable(all, end)) end += 1;
  const made = el("p");
  inline(made, all.slice(i, end).map((l) => l.text.trimStart()).join("\n").trimEnd());
  return [made, end];
}

function trimHashes(text) {
  const trimmed = text.trim();
  let end = trimmed.length;
  while (end && trimmed[end - 1] === "#") end -= 1;
  return end === 0 || trimmed[end - 1] === " " ? trimmed.slice(0, end).trim() : trimmed;
}

function code(all, i, fence) {
  const mark = fence[1];
  const lead = indent(all[i]);
  const name = all[i].text.slice(fence[0].length).trim().split(" ")[0].slice(0, 40);
  let end = i + 1;
  const closes = (t) => {
    const found = FENCE.exec(t);
    return found && found[1][0] === mark[0] && found[1].length >= mark.length && t.slice(found[0].length).trim() === "";
  };
  while (end < all.length && !closes(all[end].text)) end += 1;
  const text = all.slice(i + 1, end).map((l) => l.text.slice(Math.min(lead, indent(l)))).join("\n");
  const head = el("div", { class: "code-head" }, el("span", {}, name), copyButton(() => text, "Copy", "Copy code"));
  const body = el("pre", { tabindex: "0", "aria-label": name ? `Code, ${name}` : "Code" }, el("code", {}, text));
  return [el("div", { class: "code" }, head, body), Math.min(all.length, end + 1)];
}

function quote(all, i, depth) {
  let end = i;
  const inner = [];
  while (end < all.length && /^ {0,3}>/.test(all[end].text)) {
    const rest = all[end].text.trimStart().slice(1);
    inner.push({ at: 0, text: rest.startsWith(" ") ? rest.slice(1) : rest });
    end += 1;
  }
  return [fill(el("blockquote"), blocks(inner, depth + 1).map((b) => b.node)), end];
}

/** A list. Lines that are indented by two or more belong to the item above, as models write them. */
function list(all, i, depth) {
  const kind = (mark) => (mark.length === 1 ? mark : mark.at(-1));
  const first = ITEM.exec(all[i].text);
  const ordered = first[2].length > 1;
  const made = el(ordered ? "ol" : "ul", { start: ordered && parseInt(first[2], 10) !== 1 ? parseInt(first[2], 10) : null });
  let at = i;
  while (at < all.length) {
    const item = ITEM.exec(all[at].text);
    if (!item || kind(item[2]) !== kind(first[2]) || isRule(all[at].text)) break;
    const width = Math.min(item[0].length, all[at].text.length);
    const inner = [{ at: 0, text: all[at].text.slice(width) }];
    let end = at + 1;
    for (; end < all.length; end += 1) {
      const line = all[end];
      if (blank(line)) {
        inner.push({ at: 0, text: "" });
        continue;
      }
      const deep = indent(line);
      const lazy = !blank(all[end - 1]) && !begins(line) && !ITEM.test(line.text);
      if (deep < item[1].length + 2 && !lazy) break;
      inner.push({ at: 0, text: line.text.slice(Math.min(deep, width)) });
    }
    const gap = inner.findIndex(blank);
    made.append(listItem(inner, depth, gap >= 0 && gap < inner.findLastIndex((l) => !blank(l))));
    at = end;
  }
  return [made, at];
}

function listItem(inner, depth, loose) {
  const made = el("li");
  const task = /^\[([ xX])\] /.exec(inner[0].text);
  if (task) {
    inner[0].text = inner[0].text.slice(4);
    made.append(el("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": "task" }), " ");
  }
  for (const { node } of blocks(inner, depth + 1)) {
    if (node.tagName === "P" && !loose) fill(made, [...node.childNodes]);
    else made.append(node);
  }
  return made;
}

/** Cells of a row of a table; a bar behind a backslash is text. */
function cells(text) {
  const out = [""];
  const row = text.trim();
  for (let i = row.startsWith("|") ? 1 : 0; i < row.length; i += 1) {
    if (row[i] === "\\" && row[i + 1] === "|") {
      out[out.length - 1] += "|";
      i += 1;
    } else if (row[i] === "|") out.push("");
    else out[out.length - 1] += row[i];
  }
  if (row.endsWith("|") && out.length > 1 && out.at(-1) === "") out.pop();
  return out.map((c) => c.trim());
}

/** Cells of line `i` and the alignments below them, if a table begins there. */
function headOfTable(all, i) {
  if (i + 1 >= all.length || !all[i].text.includes("|") || !/^[ |:-]*-[ |:-]*$/.test(all[i + 1].text)) return null;
  const texts = cells(all[i].text);
  const marks = cells(all[i + 1].text);
  if (marks.length !== texts.length || !marks.every((m) => /^:?-+:?$/.test(m))) return null;
  return { texts, align: marks.map((m) => (m.endsWith(":") ? (m.startsWith(":") ? "center" : "right") : null)) };
}

function table(all, i, { texts: head, align }) {
  const row = (texts, tag) =>
    el("tr", {}, ...head.map((_, k) => {
      const cell = el(tag, { class: align[k] });
      inline(cell, texts[k] ?? "");
      return cell;
    }));
  let end = i + 2;
  const body = [];
  while (end < all.length && !blank(all[end]) && all[end].text.includes("|")) {
    body.push(row(cells(all[end].text), "td"));
    end += 1;
  }
  const made = el("table", {}, el("thead", {}, row(head, "th")), fill(el("tbody"), body));
  return [el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, made), end];
}

// -- what stands in a line --

/** Emphasis, code, links and line breaks of `text`, into `parent`. */
function inline(parent, text, links = true) {
  new Inline(text, links).into(parent);
}

class Inline {
  constructor(text, links) {
    this.text = text;
    this.links = links;
    this.frames = [{ mark: "", children: [] }]; // emphasis that was opened, outermost first
    this.plain = ""; // text that has no node yet
    this.ticks = new Map(); // length of a run of backticks -> where such runs begin
    for (const run of text.matchAll(/`+/g)) {
      const length = run[0].length;
      if (!this.ticks.has(length)) this.ticks.set(length, { at: [], passed: 0 });
      this.ticks.get(length).at.push(run.index);
    }
    this.closing = links ? brackets(text) : new Map();
  }

  into(parent) {
    for (let i = 0; i < this.text.length; ) i = this.step(i);
    while (this.frames.length > 1) this.unwind();
    this.flush();
    fill(parent, this.frames[0].children);
  }

  /** What begins at `i`; where the next begins. */
  step(i) {
    const c = this.text[i];
    if (c === "\\" && PUNCTUATION.test(this.text[i + 1] ?? "")) return this.say(this.text[i + 1], i + 2);
    if (c === "\n") return this.add(el("br"), i + 1);
    if (c === "`") return this.codeSpan(i);
    if (c === "!" && this.text[i + 1] === "[") return this.link(i + 1, "image: ") ?? this.say(c, i + 1);
    if (c === "[") return this.link(i, "") ?? this.say(c, i + 1);
    if (c === "*" || c === "_" || c === "~") return this.emphasis(i);
    if (c === "&") {
      const found = /^&(#?\w{2,6});/.exec(this.text.slice(i, i + 9));
      if (found && Object.hasOwn(ENTITIES, found[1])) return this.say(ENTITIES[found[1]], i + found[0].length);
    }
    if (c === "<" || c === "h" || c === "H") return this.bareLink(i) ?? this.say(c, i + 1);
    return this.say(c, i + 1);
  }

  say(text, next) {
    this.plain += text;
    return next;
  }

  flush() {
    if (this.plain) this.frames.at(-1).children.push(document.createTextNode(this.plain));
    this.plain = "";
  }

  add(node, next) {
    this.flush();
    this.frames.at(-1).children.push(node);
    return next;
  }

  /** The innermost emphasis never closed: its mark is text. */
  unwind() {
    this.flush();
    const frame = this.frames.pop();
    const outer = this.frames.at(-1).children;
    outer.push(document.createTextNode(frame.mark));
    for (const child of frame.children) outer.push(child);
  }

  codeSpan(i) {
    let end = i;
    while (this.text[end] === "`") end += 1;
    const starts = this.ticks.get(end - i) ?? { at: [], passed: 0 }; // none: a backslash took the first of the run
    while (starts.at[starts.passed] < end) starts.passed += 1;
    const close = starts.at[starts.passed];
    if (close === undefined) return this.say(this.text.slice(i, end), end);
    let inner = this.text.slice(end, close).replaceAll("\n", " ");
    if (inner.startsWith(" ") && inner.endsWith(" ") && inner.trim()) inner = inner.slice(1, -1);
    return this.add(el("code", {}, inner), close + (end - i));
  }

  emphasis(i) {
    const c = this.text[i];
    let end = i;
    while (this.text[end] === c && end - i < 3) end += 1;
    if (this.text[end] === c || (c === "~" && end - i !== 2)) {
      while (this.text[end] === c) end += 1;
      return this.say(this.text.slice(i, end), end); // a row of them is a decoration
    }
    const mark = this.text.slice(i, end);
    const before = this.text[i - 1] ?? " ";
    const after = this.text[end] ?? " ";
    const word = (x) => /[\p{L}\p{N}]/u.test(x);
    const opens = !/\s/.test(after) && !(c === "_" && word(before));
    const closes = !/\s/.test(before) && !(c === "_" && word(after));
    if (closes && this.close(mark)) return end;
    if (opens && this.frames.length < MOST_MARKS) {
      this.flush();
      this.frames.push({ mark, children: [] });
      return end;
    }
    return this.say(mark, end);
  }

  /** End the emphasis that `mark` opened; what was opened in it and not closed is text. */
  close(mark) {
    let at = this.frames.length - 1;
    while (at > 0 && this.frames[at].mark !== mark) at -= 1;
    if (at === 0) return mark.length === 3 && this.closeBoth(mark);
    while (this.frames.length - 1 > at) this.unwind();
    this.flush();
    const frame = this.frames.pop();
    const tags = mark[0] === "~" ? ["del"] : [["em"], ["strong"], ["em", "strong"]][mark.length - 1];
    let node = fill(el(tags[0]), frame.children);
    for (const tag of tags.slice(1)) node = el(tag, {}, node);
    this.frames.at(-1).children.push(node);
    return true;
  }

  /** Three marks that close one of one and one of two, in either order. */
  closeBoth(mark) {
    const [one, two] = [mark.slice(0, 1), mark.slice(0, 2)];
    const has = (m) => this.frames.some((f) => f.mark === m);
    if (!has(one) || !has(two)) return false;
    const inner = this.frames.findLast((f) => f.mark === one || f.mark === two).mark;
    this.close(inner);
    return this.close(inner === one ? two : one);
  }

  /** [label](address) at `i`; null: there is none. */
  link(i, prefix) {
    const end = this.closing.get(i);
    if (end === undefined || this.text[end + 1] !== "(") return null;
    let depth = 0;
    let close = end + 1;
    const most = Math.min(this.text.length, close + MOST_URL);
    for (; close < most; close += 1) {
      if (this.text[close] === "(") depth += 1;
      else if (this.text[close] === ")" && --depth === 0) break;
      else if (this.text[close] === "\n") return null;
    }
    if (depth !== 0) return null;
    const address = this.text.slice(end + 2, close).trim().split(/\s/)[0].replace(/^<|>$/g, "");
    const made = anchor(address);
    if (!made) return null;
    if (prefix) made.append(prefix);
    inline(made, this.text.slice(i + 1, end) || address, false);
    return this.add(made, close + 1);
  }

  /** An address in the text, or between < and >. */
  bareLink(i) {
    if (!this.links) return null;
    const framed = this.text[i] === "<";
    if (!framed && /[\p{L}\p{N}]/u.test(this.text[i - 1] ?? " ")) return null;
    const found = /^https?:\/\/[^\s<>"`]+/i.exec(this.text.slice(framed ? i + 1 : i, i + MOST_URL));
    if (!found) return null;
    let address = found[0];
    if (framed) {
      if (this.text[i + 1 + address.length] !== ">") return null;
    } else {
      while (/[.,;:!?'*_~\])]$/.test(address)) {
        if (address.endsWith(")") && address.split("(").length >= address.split(")").length) break;
        address = address.slice(0, -1);
      }
    }
    const made = anchor(address);
    if (!made) return null;
    made.append(address);
    return this.add(made, i + address.length + (framed ? 2 : 0));
  }
}

/** Which bracket closes which, of those that close at all. */
function brackets(text) {
  const open = [];
  const out = new Map();
  for (let i = 0; i < text.length; i += 1) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === "[") open.push(i);
    else if (text[i] === "]" && open.length) out.set(open.pop(), i);
  }
  return out;
}

/** A link that leaves the page alone; null where the address is none of http and https. */
function anchor(address) {
  if (!/^https?:\/\/\S/i.test(address) || !URL.canParse(address)) return null;
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow", title: address });
}
