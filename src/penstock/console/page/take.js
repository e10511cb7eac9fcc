// What a reader takes along from a view: its link, one HTML file, and its metrics as CSV and Parquet.

import * as api from "./api.js";
import { el, failure, menu } from "../charts/dom.js";

const FORMS = [["html", "Page", "one HTML file that needs no network"], ["csv", "CSV", "for a spreadsheet, nothing thinned"], ["parquet", "Parquet", "for programs, nothing thinned"]];

/** Return a menu. addressOf(form): the server's address of the view as "html", "csv" or "parquet", asked when it opens. */
export function takeAlong(addressOf) {
  const choices = el("div", { class: "choices" });
  const said = el("div");
  const save = async (event) => {
    const { href } = event.currentTarget;
    event.preventDefault();  // the answer to a link would replace the page if it is an error
    said.replaceChildren(el("small", { role: "status" }, "Being written\u2026"));
    try {
      await api.begins(href);
      el("a", { href, download: "" }).click();
      said.replaceChildren();
    } catch (error) {
      said.replaceChildren(failure(error));
    }
  };
  return menu("Take along", choices, () => {
    const here = el("input", { type: "text", readOnly: true, value: location.href, on: { focus: (event) => event.target.select() } });
    said.replaceChildren();
    choices.replaceChildren(
      ...FORMS.map(([form, title, hint]) => el("a", { href: addressOf(form), on: { click: save } }, el("b", {}, title), el("small", {}, hint))),
      said, el("label", {}, el("small", {}, "Link to this view"), here));
  });
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
