// Loaded before anything is drawn, so that no page flashes in the wrong colours. Not a module: those come later.
(() => {
  const KEY = "ds4.theme";
  const NEXT = { auto: "light", light: "dark", dark: "auto" };
  const SAID = { auto: "as the system", light: "light", dark: "dark" };
  const chosen = () => {
    try {
      const theme = localStorage.getItem(KEY);
      return theme in NEXT ? theme : "auto";
    } catch {
      return "auto"; // storage is switched off
    }
  };
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      button.setAttribute("aria-label", `Colours: ${SAID[theme]}. Change`);
      button.title = `Colours: ${SAID[theme]}`;
      button.textContent = { auto: "◐", light: "☀", dark: "☾" }[theme];
    }
  };
  show(chosen());
  document.addEventListener("DOMContentLoaded", () => {
    show(chosen());
    document.getElementById("theme")?.addEventListener("click", () => {
      const theme = NEXT[chosen()];
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        // for this page only, then
      }
      show(theme);
    });
  });
  window.addEventListener("storage", (e) => e.key === KEY && show(chosen()));
})();
