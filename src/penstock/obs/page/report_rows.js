// The rows of a step in a report: what is in #rows-data.

{
  const found = JSON.parse(document.querySelector("#rows-data").textContent);
  document.querySelector("#step-rows").replaceChildren(el("p", { class: "quiet" }, rowsSaid(found)),
    found.note ? el("p", { class: "notice" }, found.note) : "", ...found.rows.map((row) => rowCard(row)));
}
