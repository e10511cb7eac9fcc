// The recipe of a run by its keys, with a search; all of it, or what differs from the defaults.

import { DEFAULTS } from "./defaults.js";
import { el, table } from "./dom.js";

const OF_CORPORA = Object.keys(DEFAULTS).filter((key) => key.includes("*")).map((key) => [...key.split("*"), DEFAULTS[key]]);

export const setting = (value) => (value === null || value === undefined ? "\u2013" : typeof value === "object" ? JSON.stringify(value) : String(value));

function isDefault(key, value) {
  if (Object.hasOwn(DEFAULTS, key)) return DEFAULTS[key] === setting(value);
  return OF_CORPORA.some(([before, after, usual]) => key.startsWith(before) && key.endsWith(after) && usual === setting(value));
}

export class RecipeView {
  constructor(body, page) {
    const keys = Object.entries(page.run.recipe || {}), place = el("div");
    const text = el("input", { type: "search", placeholder: "Search keys and values", "aria-label": "Search keys and values" }), only = el("input", { type: "checkbox" });
    const draw = () => {
      const found = keys.filter(([key, value]) => `${key} ${setting(value)}`.toLowerCase().includes(text.value.toLowerCase()) && !(only.checked && isDefault(key, value)));
      place.replaceChildren(found.length ? table("Recipe", ["key", "value"], found.map(([key, value]) => [el("code", {}, key), el("code", {}, setting(value))]), { className: "wordy" }) : el("p", { class: "empty" }, "No key matches."));
    };
    for (const input of [text, only]) input.addEventListener("input", draw);
    body.append(el("div", { class: "toolbar" }, text, el("label", {}, only, " Only what differs from the defaults")), place);
    draw();
  }
}
