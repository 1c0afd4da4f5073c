// Elements without markup text: nothing that anybody wrote is ever parsed as HTML.

/** An element: attributes (`on...` are listeners, `null` and `false` leave one out), then children or text. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((c) => c !== null));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Text into the clipboard; pages that came over plain HTTP from another machine have no clipboard of their own. */
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const box = el("textarea", { class: "unseen", "aria-hidden": "true" });
  box.value = text;
  const before = document.activeElement;
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  before?.focus?.();
  if (!done) throw new Error("the browser does not let this page copy");
}

/** A button that copies what `text()` returns, and says whether it did. */
export function copyButton(text, label = "Copy", about = "Copy") {
  const button = el("button", { type: "button", class: "small", "aria-label": about }, label);
  button.addEventListener("click", async () => {
    try {
      await copyText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Cannot copy";
    }
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}
