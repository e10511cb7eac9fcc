// Routes: the address behind # names the view, so every view is a link.
//
//   #/                       the runs          #/run/ID/TAB     one run: curves, mixture, ranks, rows, answers, chat, recipe
//   #/compare?runs=A,B       over one another

import { el, failure, link } from "../charts/dom.js";
import * as compare from "./compare.js";
import * as run from "./run.js";
import * as runs from "./table.js";

const main = document.querySelector("#main"), crumbs = document.querySelector("#crumbs");
let view = null, turn = 0;

function parsed() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split("?");
  const words = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { words, query: new URLSearchParams(query) };
}

/** Show where the reader is: [[address, text]], the last without a link. */
function trail(...places) {
  crumbs.replaceChildren(...places.map(([href, text], i) =>
    i < places.length - 1 ? link(href, text) : el("span", { "aria-current": "page" }, text)));
  document.title = places.length ? `${places[places.length - 1][1]} \u00b7 Penstock` : "Penstock console";
}

async function open() {
  const mine = ++turn;
  try {
    const { words, query } = parsed();
    if (view?.moved?.(words, query)) return;
    const before = view;
    view = null;
    before?.close();
    main.replaceChildren(el("p", { class: "loading", role: "status" }, "Reading\u2026"));
    // A view is opened without being shown: one that is slow to open must not replace one opened after it.
    const opened = words[0] === "run" ? await run.open(words[1], words[2], query)
      : words[0] === "compare" ? await compare.open(query)
      : await runs.open(query);
    if (mine !== turn) return;
    view = opened;
    trail(...view.places);
    main.replaceChildren(view.root);
    view.begin();
  } catch (error) {
    if (mine !== turn) return;
    view?.close();  // of an address that cannot be read: the view before it would write its own again
    view = null;
    main.replaceChildren(failure(error), el("p", {}, link("#/", "All runs")));
  }
}

window.addEventListener("hashchange", () => open().then(() => main.focus({ preventScroll: true })));
open();
