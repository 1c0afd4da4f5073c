// The settings' dialog; `values` is what its fields hold.
import { byId } from "./dom.js";
import { DEFAULTS, loadSettings, saveSettings } from "./store.js";

export class SettingsDialog {
  constructor() {
    this.values = loadSettings();
    this.form = byId("settings-form");
    this.dialog = byId("settings-dialog");
    this.fill();
    this.form.addEventListener("input", () => this.take());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault(); // only reached when every field is valid
      this.dialog.close();
    });
    byId("settings-reset").addEventListener("click", () => {
      this.values = { ...DEFAULTS };
      this.fill();
      saveSettings(this.values);
    });
    byId("settings").addEventListener("click", () => this.dialog.showModal());
  }

  fill() {
    for (const [name, value] of Object.entries(this.values)) this.form.elements[name].value = value;
    this.showNumber();
  }

  take() {
    for (const name of Object.keys(DEFAULTS)) {
      const field = this.form.elements[name];
      if (field.checkValidity()) this.values[name] = field.value;
    }
    this.showNumber();
    saveSettings(this.values);
  }

  showNumber() {
    const on = this.form.elements.effort.value === "number";
    byId("effort-number").hidden = !on;
    this.form.elements.effort_number.disabled = !on; // a field that nobody sees cannot be wrong
  }

  /** Whether every field holds what a request may say; if not, the dialog shows which does not. */
  valid() {
    if (this.form.checkValidity()) return true;
    if (!this.dialog.open) this.dialog.showModal();
    this.form.reportValidity();
    return false;
  }
}
