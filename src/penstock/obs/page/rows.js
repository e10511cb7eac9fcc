// Rows of a step as cards: documents, text, learned tokens, and the loss of each token as a colour.
// The console shows them with what it asks for, a report with what is embedded in it.

import { el } from "./dom.js";
import { count, written } from "./charts.js";

const WORST = 12, SHADES = 6;

/** Return the card of a row, with other nodes under its heading. */
export function rowCard(row, ...others) {
  const facts = [`row ${count(row.row)}`, `sample ${count(row.sample)}`, row.epoch ? `epoch ${count(row.epoch)}` : "", row.loss !== null ? `loss ${written(row.loss)}` : ""];
  const hasUnlearned = row.documents.some(({ pieces }) => pieces.some(([, learned]) => !learned));
  return el("article", { class: "card" },
    el("h2", {}, `${row.corpus || "padding"} `, el("small", {}, facts.filter(Boolean).join(" \u00b7 "))),
    row.checkpoint !== null ? legend(row.checkpoint) : "", others,
    hasUnlearned ? el("p", { class: "quiet" }, el("span", { class: "unlearned" }, "Dimmed"), " tokens are read, not learned.") : "",
    row.documents.map((document) => documentOf(document)));
}

/** Return which rows of a step are shown, as text. */
export const rowsSaid = ({ step, rows, offset, num_rows: all }) => `Step ${count(step)}: rows ${count(offset)} to ${count(offset + rows.length - 1)} of ${count(all)}`;

function legend(checkpoint) {
  const scale = Array.from({ length: SHADES }, (_, i) => {
    const shade = el("i", { class: "swatch area" });
    shade.style.backgroundColor = shadeOf((i / (SHADES - 1)) * WORST);
    return shade;
  });
  return el("p", { class: "scale-of" }, "loss 0", scale, `${WORST} nats and more, under the checkpoint of step ${count(checkpoint)}`);
}

const shadeOf = (loss) => `rgb(216 72 92 / ${(Math.min(loss / WORST, 1) * 0.55).toFixed(3)})`;

function documentOf({ document, corpus, shard, offset, tokens, loss, pieces }) {
  if (document === null) return el("p", { class: "quiet" }, `${count(tokens)} tokens of padding`);
  const facts = [`document ${corpus}:${document}`, `${count(tokens)} tokens from token ${count(offset)}`, shard, loss !== null ? `loss ${written(loss)}` : ""];
  const text = el("pre", { tabindex: "0", role: "region", "aria-label": `Text of document ${corpus}:${document} from token ${offset}` }, pieces.map(pieceOf));
  return el("div", { class: "document" }, el("p", { class: "quiet" }, facts.filter(Boolean).join(" \u00b7 ")), text, loss !== null ? readout(text, pieces) : "");
}

/** Return the line that tells the loss of one token of a text: the one that is tapped, or that the left and right arrow keys move to. */
function readout(text, pieces) {
  const said = el("p", { class: "readout", role: "status" }, "Tap a token, or move with the left and right arrow keys, for its loss.");
  let at = -1;
  const show = (i) => {
    text.children[at]?.classList.remove("at");
    text.children[i].classList.add("at");
    text.children[i].scrollIntoView({ block: "nearest" });
    at = i;
    const [token, , loss] = pieces[i];
    said.textContent = `${JSON.stringify(token)}: ${loss === null ? "no loss" : `loss ${written(loss)}`}`;
  };
  text.addEventListener("click", ({ target }) => { if (target !== text) show([...text.children].indexOf(target)); });
  text.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(Math.min(Math.max(at + move, 0), pieces.length - 1));
  });
  return said;
}

function pieceOf([text, learned, loss]) {
  const part = el("span", { class: learned ? "" : "unlearned", title: loss === null ? "" : `loss ${written(loss)}` }, text);
  if (loss !== null) part.style.backgroundColor = shadeOf(loss);
  return part;
}
