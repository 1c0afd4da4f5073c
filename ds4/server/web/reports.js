// The rulers' reports and the nights. They are fetched with the key, as the API is, and shown where they can do nothing:
// HTML in a frame without scripts and of no origin, SVG as an image.
import { byId, el } from "./dom.js";
import { askKey } from "./keydialog.js";
import { render } from "./markdown.js";
import { Refused, call } from "./server.js";

const FORMATS = ["html", "svg", "md", "json"]; // the one to begin with first
const GROUPS = [["night", "Nights"], ["rejected", "Nights that were rejected"], ["report", "Reports"]];
const TYPES = { html: "text/html;charset=utf-8", svg: "image/svg+xml", md: "text/markdown", json: "application/json" };
const files = "/report-files";
let reports = [];
let history = [];
let address = null; // of what is shown
let turn = 0; // a report that comes late, after another was chosen, is dropped

const view = byId("view");
const pathOf = (name) => `${files}/${name.split("/").map(encodeURIComponent).join("/")}`;
const date = (s) => new Date(1000 * s).toLocaleString();

async function start() {
  try {
    const listing = await (await call(files, { askKey })).json();
    ({ reports, history } = listing);
    drawList(listing);
    await open();
  } catch (error) {
    byId("list").replaceChildren(el("p", { class: "notice bad" }, wordsOf(error)),
      el("button", { type: "button", onclick: () => void start() }, "Try again"));
  }
}

const wordsOf = (error) => (error instanceof Refused ? error.message : `This page failed: ${error.message}`);

function drawList(listing) {
  const out = [];
  for (const [kind, title] of GROUPS) {
    const those = reports.filter((r) => r.kind === kind);
    if (!those.length) continue;
    out.push(el("h2", {}, title), el("ul", {}, ...those.map((report) => {
      const name = report.files[FORMATS.find((f) => f in report.files)];
      const notes = [report.current ? "mounted" : null, date(report.modified)].filter(Boolean).join(", ");
      return el("li", {}, el("a", { href: `#${encodeURIComponent(name)}` }, report.title, el("small", {}, notes)));
    })));
  }
  if (history.length) out.push(el("h2", {}, "History"), el("ul", {}, el("li", {}, el("a", { href: "#history" }, "What happened to the nights"))));
  if (!out.length) {
    out.push(el("p", { class: "empty" }, listing.shown.length
      ? "There is no report yet. ds4 ruler report writes one into a folder."
      : "This server was started without --reports DIR."));
  }
  if (!listing.whole) out.push(el("p", { class: "notice" }, "The folder holds more than is listed here."));
  byId("list").replaceChildren(...out);
}

async function open() {
  const mine = (turn += 1);
  const name = wanted();
  for (const link of byId("list").querySelectorAll("a")) {
    const here = link.hash === location.hash || reports.some((r) => Object.values(r.files).includes(name) && Object.values(r.files).some((f) => link.hash === `#${encodeURIComponent(f)}`));
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!name) return;
  if (name === "history") {
    put(el("h2", {}, "History"), historyTable());
    return;
  }
  try {
    const data = await (await call(pathOf(name), { askKey })).blob();
    if (mine === turn) await put(...(await shown(name, data)));
  } catch (error) {
    if (mine === turn) put(el("p", { class: "notice bad" }, wordsOf(error)));
  }
}

function wanted() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
}

function put(...children) {
  view.replaceChildren(...children);
  document.title = `ds4: ${view.querySelector("h2")?.textContent ?? "reports"}`;
}

async function shown(name, data) {
  const kind = name.slice(name.lastIndexOf(".") + 1);
  if (address) URL.revokeObjectURL(address);
  address = URL.createObjectURL(new Blob([data], { type: TYPES[kind] }));
  const report = reports.find((r) => Object.values(r.files).includes(name));
  const links = FORMATS.filter((f) => report && f in report.files).map((f) =>
    el("a", { class: "button small", href: `#${encodeURIComponent(report.files[f])}`, "aria-current": report.files[f] === name ? "page" : null }, f));
  const save = el("a", { class: "button small", href: address, download: name.split("/").slice(1).join("-") }, "Save");
  const title = report?.title ?? name;
  return [el("div", { class: "view-head" }, el("h2", {}, title), ...links, save), await body(kind, data, title)];
}

async function body(kind, data, title) {
  if (kind === "html") return el("iframe", { sandbox: "", src: address, title });
  if (kind === "svg") return el("div", { class: "wide" }, el("img", { src: address, alt: title }));
  const text = await data.text();
  if (kind === "md") {
    const box = el("div", { class: "text" });
    box.append(render(text.replaceAll(/ *<!--[ \w]*-->/g, ""))); // digests that ds4 forget looks for
    return box;
  }
  let pretty = text;
  try {
    pretty = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // shown as it is
  }
  return el("pre", { tabindex: "0", "aria-label": title }, pretty);
}

function historyTable() {
  const columns = ["at", "event", "day", "night", "method", "before", "reason"];
  const row = (tag, cells) => el("tr", {}, ...cells.map((c, i) => el(tag, { class: i < 4 ? "whole" : null }, c)));
  const cell = (value) => (value === undefined ? "" : value === null ? "none" : value);
  const rows = history.map((line) => row("td", columns.map((c) => cell(c === "at" ? line.at?.slice(0, 19).replace("T", " ") : line[c]))));
  const table = el("table", {}, el("thead", {}, row("th", columns)), el("tbody", {}, ...rows));
  return el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "History" }, table);
}

window.addEventListener("hashchange", () => void open());
void start();
