// The heat map of a report: its numbers are in #ranks-data, a table for each metric, and where ranks ran once for all.

{
  const { shown, tables, names, places } = JSON.parse(document.querySelector("#ranks-data").textContent);
  const starts = places.map((place) => Object.fromEntries(["hosts", "devices", "nics"].map((what) => [what, place[what].map((i) => names[i])])));
  const found = (metric) => ({
    ...tables[metric], metric, metrics: Object.keys(tables),
    starts: tables[metric].starts.map(([column, place]) => ({ column, ...starts[place] })),
  });
  const map = new HeatMap((metric) => map.show(found(metric)));
  document.querySelector("#heat-map").replaceChildren(map.root, map.highest);
  map.show(found(shown));
}
