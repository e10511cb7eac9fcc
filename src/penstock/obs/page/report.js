// The charts of a report: this script stands behind charts.js in one element, and draws the numbers in #chart-data.

const data = JSON.parse(document.querySelector("#chart-data").textContent);
const host = document.querySelector("#charts"), charts = [];
let smoothing = data.chosen;
document.querySelector("#in-words").remove();

/** Return the layers to draw: a line that is smoothed is its mean, with the line itself behind it or without. */
function drawn(layers) {
  return layers.flatMap(({ means, stays, ...layer }) => {
    const mean = smoothing && means?.[smoothing - 1];
    if (!mean) return [layer];
    return [...(stays ? [{ ...layer, isFaint: true }] : []), { ...layer, ...mean }];
  });
}

const tools = made("div", "toolbar");
if (data.charts.some(({ layers }) => layers.some(({ means }) => means))) {
  const select = document.createElement("select");
  select.append(...data.smoothing.map((text, i) => new Option(text, i, i === smoothing, i === smoothing)));
  select.addEventListener("change", () => {
    smoothing = Number(select.value);
    charts.forEach((chart, i) => chart.setLayers(drawn(data.charts[i].layers)));
  });
  const label = made("label", "", "Smoothing ");
  label.append(select);
  tools.append(label);
}
tools.append(made("span", "hint", "Drag to zoom, double-click for the whole run; keys: arrows, + - 0."));
host.before(tools);

for (const options of data.charts) {
  charts.push(new Chart(host, {
    ...options,
    layers: drawn(options.layers),
    height: options.id === "loss" ? 300 : 190,
    isTitled: true,
    sync: options.along,
    // What has one axis shows one range.
    onRange: (from, to, one) => charts.forEach((chart) => {
      if (chart !== one && chart.options.along === options.along) chart.zoom(from, to, { isTold: true });
    }),
  }));
}
