// The recipe of a run by its keys, with a search, and its starts.

import { el, table } from "../charts/dom.js";
import { count, written } from "../charts/charts.js";

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
    const starts = page.run.starts || [];
    if (starts.length) body.append(el("section", {}, el("h2", {}, "Starts"), table("Starts", ["at step", "ranks", "time", "changed in the recipe"], starts.map((start) => [
      count(start.step), count(start.ranks), String(start.time ?? "").replace("T", " ").slice(0, 19), changes(start.changes)]), { className: "wordy" })));
  }
}

function changes(found) {
  if (!found) return "";
  const rows = Array.isArray(found) ? found : Object.entries(found).map(([key, pair]) => [key, ...(Array.isArray(pair) ? pair : [])]);
  return rows.map(([key, before, now]) => `${key} ${setting(before)} \u2192 ${setting(now)}`).join("; ");
}
