// Routes: the address behind # names the view, so every view is a link.
//
//   #/                       the first view    #/run/ID/TAB     one run, and its views (run.js)
//   #/compare?runs=A,B       over one another

import * as compare from "./compare.js";
import { el, failure, link } from "./dom.js";
import * as run from "./run.js";

const main = document.querySelector("#main"), crumbs = document.querySelector("#crumbs");

/**
 * Open the view of the address, now and whenever it changes.
 *
 * source: where the views read (console/page/api.js, or what a report has inlined); home: { title, word, open(query) } of the
 * first view, and the word of its own address; views: those of a run besides its own, name -> [title, class].
 */
export function start(source, home, views = {}) {
  let view = null, turn = 0;

  /** Show where the reader is. */
  function trail(title, isHome) {
    const here = el("span", { "aria-current": "page" }, title);
    crumbs.replaceChildren(...(isHome ? [here] : [link("#/", home.title), here]));
    document.title = `${title} \u00b7 Penstock`;
  }

  async function open() {
    const mine = ++turn;
    try {
      const [path, search = ""] = location.hash.replace(/^#/, "").split("?");
      const words = path.split("/").filter(Boolean).map(decodeURIComponent), query = new URLSearchParams(search);
      if (view?.moved?.(words, query)) return;
      const before = view;
      view = null;
      before?.close();
      main.replaceChildren(el("p", { class: "loading", role: "status" }, "Reading\u2026"));
      // A view is opened without being shown: one that is slow to open must not replace one opened after it.
      const opened = words[0] === "run" ? await run.open(source, views, words[1], words[2], query)
        : words[0] === "compare" ? await compare.open(source, query)
        : await home.open(query);
      if (mine !== turn) return;
      view = opened;
      trail(view.title, !words.length || words[0] === home.word);
      main.replaceChildren(view.root);
      view.begin();
    } catch (error) {
      if (mine !== turn) return;
      view?.close();  // of an address that cannot be read: the view before it would write its own again
      view = null;
      main.replaceChildren(failure(error), el("p", {}, link("#/", `Back to ${home.title}`)));
    }
  }

  window.addEventListener("hashchange", () => open().then(() => main.focus({ preventScroll: true })));
  open();
}
