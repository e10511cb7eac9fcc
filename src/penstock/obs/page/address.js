// Addresses of views: what is shown is in them, so that each is a link; and how to take a run along as files.

import { el, menu, quoted } from "./dom.js";

/** Return a menu with the link to the view, and the commands that write these runs as a page and as a table. */
export function takeAlong(paths, compared = paths.length > 1 ? "compared" : "") {
  const words = `penstock report ${paths.map(quoted).join(" ")}`, choices = el("div", { class: "choices" });
  const shown = (title, value) => el("label", {}, el("small", {}, title), el("input", { type: "text", readOnly: true, value, on: { focus: (event) => event.target.select() } }));
  return menu("Take along", choices, () => choices.replaceChildren(
    shown("Link to this view", location.href),
    shown("One HTML file, on a command line", compared ? `${words} --out ${compared}.html` : words),
    shown("Metrics of every step (.csv or .parquet)", `${words} --out ${compared || "metrics"}.csv`)));
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
