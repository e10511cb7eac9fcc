// What a reader takes along from a view: its link, one HTML file, and its metrics as CSV and Parquet.

import { el } from "./dom.js";

const FORMS = [["html", "Page", "one HTML file that needs no network"], ["csv", "CSV", "for a spreadsheet, nothing thinned"], ["parquet", "Parquet", "for programs, nothing thinned"]];

/** Return a menu. addressOf(form): the server's address of the view as "html", "csv" or "parquet", asked when it opens; null: it has a link only. */
export function takeAlong(addressOf) {
  const choices = el("div", { class: "choices" });
  const menu = el("details", { class: "menu" }, el("summary", { class: "button" }, "Take along"), choices);
  const close = (event) => {
    if (!menu.contains(event.target)) menu.open = false;
  };
  menu.addEventListener("toggle", () => {
    document[menu.open ? "addEventListener" : "removeEventListener"]("pointerdown", close);
    if (!menu.open) return;
    const here = el("input", { type: "text", readOnly: true, value: location.href, on: { focus: (event) => event.target.select() } });
    choices.replaceChildren(
      ...(addressOf ? FORMS : []).map(([form, title, hint]) => el("a", { href: addressOf(form) }, el("b", {}, title), el("small", {}, hint))),
      el("label", {}, el("small", {}, "Link to this view"), here));
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });
  return menu;
}

/** Return an address with those values that are given. */
export function address(path, values) {
  const given = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return path + (given.length ? "?" + new URLSearchParams(given) : "");
}

/** Keep what is shown in the address, so that it is a link; without a new entry in the browser's history. */
export const remember = (path, values) => history.replaceState(null, "", address("#" + path, values));

/** Return a range of an address: [from, to], or null. */
export function rangeOf(query) {
  const [from, to] = ["from", "to"].map((name) => Number.parseFloat(query.get(name)));
  return to > from ? [from, to] : null;
}

/** Return the end of a range as an address has it. */
export const place = (value) => (value === undefined ? "" : Number(value.toPrecision(8)));
