"use strict";
// The read-out of a chart: the values nearest to the pointer, or to where the arrow keys have gone.
for (const figure of document.querySelectorAll("figure.chart")) {
  const plot = figure.querySelector(".plot");
  const layers = JSON.parse(figure.querySelector("script").textContent);
  const hair = plot.appendChild(document.createElement("div"));
  const read = plot.appendChild(document.createElement("div"));
  hair.className = "hair";
  read.className = "read";
  read.setAttribute("role", "status");
  let index = layers[0].at.length - 1;

  const hide = () => { hair.hidden = read.hidden = true; };
  hide();

  const nearest = (places, at) => {
    let low = 0, high = places.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (places[middle] < at) low = middle + 1; else high = middle;
    }
    return low > 0 && at - places[low - 1] <= places[low] - at ? low - 1 : low;
  };

  const row = (label, value) => {
    const line = document.createElement("div");
    const strong = document.createElement("span");
    strong.textContent = value;
    line.append(label + " ", strong);
    return line;
  };

  const show = (at) => {
    const step = layers[0].steps[index = nearest(layers[0].at, at)];
    const head = document.createElement("b");
    head.textContent = (figure.dataset.along || "step") + " " + step;
    read.replaceChildren(head, ...layers.map((layer) => {
      const near = nearest(layer.at, at);
      const own = layer.style === "dots" && layer.steps[near] !== step;
      return row(layer.name, layer.values[near] + (own ? " at " + (figure.dataset.along || "step") + " " + layer.steps[near] : ""));
    }));
    hair.hidden = read.hidden = false;
    const svg = plot.querySelector("svg"), width = plot.clientWidth, x = layers[0].at[index] * width;
    hair.style.left = x + "px";
    hair.style.height = svg.clientHeight + "px";
    const room = Math.max(width - read.offsetWidth, 0);
    read.style.left = Math.min(x > width / 2 ? Math.max(x - read.offsetWidth - 12, 0) : x + 12, room) + "px";
  };

  const point = (event) => {
    const box = plot.getBoundingClientRect();
    show((event.clientX - box.left) / box.width);
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!way) return;
    event.preventDefault();
    const places = layers[0].at;
    show(places[Math.min(Math.max(index + (read.hidden ? 0 : way), 0), places.length - 1)]);
  });
}
