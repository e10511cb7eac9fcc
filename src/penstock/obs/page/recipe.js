// The recipe of a run by its keys, with a search.

import { el, table } from "./dom.js";

export const setting = (value) => (value === null || value === undefined ? "\u2013" : typeof value === "object" ? JSON.stringify(value) : String(value));

export class RecipeView {
  constructor(body, page) {
    const keys = Object.entries(page.run.recipe || {}), place = el("div");
    const draw = (text) => {
      const found = keys.filter(([key, value]) => `${key} ${setting(value)}`.toLowerCase().includes(text.toLowerCase()));
      place.replaceChildren(found.length ? table("Recipe", ["key", "value"], found.map(([key, value]) => [el("code", {}, key), el("code", {}, setting(value))]), { className: "wordy" }) : el("p", { class: "empty" }, "No key matches."));
    };
    body.append(el("div", { class: "toolbar" }, el("input", { type: "search", placeholder: "Search keys and values", "aria-label": "Search keys and values", on: { input: (event) => draw(event.target.value) } })), place);
    draw("");
  }
}
