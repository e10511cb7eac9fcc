"use strict";
// What a chart can do: read out the values at the pointer or the arrow keys, zoom along its steps, a log axis,
// smoothing. A page whose script does not run shows the same charts, as they were drawn.

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const svgElement = (name, attributes, text = "") => {
  const made = document.createElementNS(document.querySelector("figure.chart svg").namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
};
const percent = (share) => (100 * share).toFixed(2) + "%";

const nearest = (places, at) => {
  let low = 0, high = places.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] < at) low = middle + 1; else high = middle;
  }
  return low > 0 && at - places[low - 1] <= places[low] - at ? low - 1 : low;
};

const written = (value, unit) => {
  if (unit === "share") return Number((100 * value).toPrecision(3)) + "%";
  const size = Math.abs(value);
  if (size && (size < 0.001 || size >= 1e15)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  for (const [power, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= Math.max(power, 1e4)) return Number((value / power).toPrecision(4)) + letter;
  return Number(value.toPrecision(4)).toLocaleString("en");
};

const evenTicks = (low, high) => {
  const power = 10 ** Math.floor(Math.log10((high - low) / 5));
  const gap = ([1, 2, 5].find((factor) => (high - low) / (factor * power) <= 6) || 10) * power;
  const found = [];
  for (let place = Math.ceil(low / gap - 1e-9); place * gap <= high * (1 + 1e-12) + gap * 1e-9; place++) found.push(place * gap);
  return found;
};

const logTicks = (low, high) => {
  for (const factors of [[1, 2, 5], [1, 3], [1]]) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const factor of factors) found.push(factor * 10 ** power);
    const inside = found.filter((value) => value >= low && value <= high);
    if (inside.length <= 7 || factors.length === 1) return inside.length > 1 ? inside : evenTicks(low, high);
  }
};

// The mean of each value's neighbourhood, `width` points wide, narrower at the ends.
const smoothed = (values, width) => values.map((_, index) => {
  const part = values.slice(Math.max(index - (width >> 1), 0), index + (width >> 1) + 1);
  return part.reduce((sum, value) => sum + value, 0) / part.length;
});

for (const figure of document.querySelectorAll("figure.chart")) {
  const plot = figure.querySelector(".plot"), svg = plot.querySelector("svg"), lines = svg.querySelector("svg");
  const layers = JSON.parse(figure.querySelector("script").textContent);
  const along = figure.dataset.along || "step", unit = figure.dataset.unit;
  const box = (className) => {
    const made = plot.appendChild(document.createElement("div"));
    made.className = className;
    made.hidden = true;
    return made;
  };
  const hair = box("hair"), read = box("read"), selection = box("selection");
  read.setAttribute("role", "status");
  let index = layers[0].at.length - 1;

  // Where things lie: `from` and `to` are the ends of what is shown, as shares of the whole axis.
  const view = { from: 0, to: 1, log: figure.dataset.scale === "log", width: "" };
  const inView = (at) => (at - view.from) / (view.to - view.from);
  let shown = layers;

  const hide = () => { hair.hidden = read.hidden = true; };
  const row = (label, value) => {
    const line = document.createElement("div");
    const strong = document.createElement("span");
    strong.textContent = value;
    line.append(label + " ", strong);
    return line;
  };

  const show = (at) => {
    const first = shown[0];
    index = nearest(first.at, clamp(at, view.from, view.to));
    const head = document.createElement("b");
    head.textContent = along + " " + first.steps[index];
    read.replaceChildren(head, ...shown.map((layer) => {
      const near = nearest(layer.at, first.at[index]);
      const own = layer.style === "dots" && layer.steps[near] !== first.steps[index];
      const [mean, low, high] = [layer.y, layer.low, layer.high].map((each) => each && written(each[near], unit));
      const value = layer.values ? layer.values[near] : layer.low ? `${mean} (${low} \u2013 ${high})` : mean;
      return row(layer.name, value + (own ? " at " + along + " " + layer.steps[near] : ""));
    }));
    hair.hidden = read.hidden = false;
    const width = plot.clientWidth, x = clamp(inView(first.at[index]), 0, 1) * width;
    hair.style.left = x + "px";
    hair.style.height = svg.clientHeight + "px";
    const room = Math.max(width - read.offsetWidth, 0);
    read.style.left = Math.min(x > width / 2 ? Math.max(x - read.offsetWidth - 12, 0) : x + 12, room) + "px";
  };

  let drag = null;
  const share = (event) => {
    const place = plot.getBoundingClientRect();
    return clamp((event.clientX - place.left) / place.width, 0, 1);
  };
  const toAxis = (part) => view.from + part * (view.to - view.from);
  const point = (event) => {
    show(toAxis(share(event)));
    if (drag === null) return;
    const [left, right] = [drag, share(event)].sort((a, b) => a - b);
    selection.hidden = (right - left) * plot.clientWidth < 6;
    selection.style.left = percent(left);
    selection.style.width = percent(right - left);
    selection.style.height = svg.clientHeight + "px";
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);

  const arrows = { ArrowLeft: -1, ArrowRight: 1 };
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    if (!(event.key in arrows)) return;
    event.preventDefault();
    const places = shown[0].at;
    show(places[clamp(index + (read.hidden ? 0 : arrows[event.key]), 0, places.length - 1)]);
  });

  if (!figure.dataset.x) {  // areas: they are shares of a whole, so there is nothing to scale
    plot.addEventListener("pointerdown", point);
    continue;
  }

  const ends = figure.dataset.x.split(" ").map(Number), drawn = figure.dataset.y.split(" ").map(Number);
  const fromZero = figure.dataset.zero === "1", wasLog = view.log;
  const marks = [...svg.querySelectorAll(".mark, .note:has(.wide)")].map((element) => {
    const names = element.hasAttribute("x") ? ["x"] : ["x1", "x2"];
    return { element, names, at: parseFloat(element.getAttribute(names[0])) / 100 };
  });
  const levels = [...svg.querySelectorAll("[data-value]")];

  // The layers as they are to be drawn: the smooth line anew, from the values of each step where there are some.
  const asked = () => {
    if (view.width === "") return layers;
    const raw = layers.find((layer) => layer.style === "raw"), width = Number(view.width);
    if (width === 0) return raw ? layers.filter((layer) => layer.style !== "smooth") : layers;
    return layers.map((layer) => {
      if (layer.style !== "smooth") return layer;
      const { at, steps, y } = raw || layer;
      return { ...layer, name: raw ? "mean of " + width + " points" : layer.name, at, steps, y: smoothed(y, width), values: null };
    });
  };

  const heights = () => {
    const isWhole = view.from === 0 && view.to === 1;
    if (isWhole && view.log === wasLog) return drawn;
    let low = Infinity, high = -Infinity;
    for (const layer of shown) layer.at.forEach((at, i) => {
      if (at < view.from || at > view.to) return;
      const least = (layer.low || layer.y)[i], most = (layer.high || layer.y)[i];
      if (!view.log || least > 0) low = Math.min(low, least);
      high = Math.max(high, most);
    });
    if (!(low <= high)) return drawn;
    if (view.log) return [low / 1.1, high * 1.1];
    if (fromZero && isWhole) low = Math.min(low, 0);
    const room = (high - low || Math.abs(high) || 1) * 0.05;
    return [fromZero && isWhole ? low : low - room, high + room];
  };

  const draw = () => {
    shown = asked();
    const [low, high] = heights(), [first, last] = ends;
    const scaled = view.log ? (value) => Math.log(Math.max(value, low)) : (value) => value;
    const up = (value) => (scaled(value) - scaled(low)) / (scaled(high) - scaled(low));
    const paths = shown.flatMap((layer) => {
      const points = (values) => layer.at.map((at, i) => (1000 * inView(at)).toFixed(1) + " " + (1000 - 1000 * up(values[i])).toFixed(1));
      const around = layer.low ? [svgElement("path", { class: "band", d: "M" + [...points(layer.high), ...points(layer.low).reverse()].join("L") + "Z" })] : [];
      const line = points(layer.y);
      const path = svgElement("path", { class: layer.classes, d: "M" + (line.length > 1 ? line : [...line, ...line]).join("L") });
      return [...around, path];
    });
    lines.replaceChildren(...paths);
    lines.style.overflow = "hidden";

    for (const old of svg.querySelectorAll(".grid, .dot, .y, .x:not(.name)")) old.remove();
    const grid = (view.log ? logTicks(low, high) : evenTicks(low, high)).flatMap((value) => {
      const y = percent(1 - up(value));
      return [svgElement("line", { class: "grid", x2: "100%", y1: y, y2: y }), svgElement("text", { class: "y", x: -8, y, dy: ".32em" }, written(value, unit))];
    });
    const steps = [view.from, view.to].map((at) => first + at * (last - first));
    for (const step of evenTicks(...steps)) {
      const x = (step - steps[0]) / (steps[1] - steps[0]);
      grid.push(svgElement("text", { class: x > 0.98 ? "x edge" : "x", x: percent(x), y: "100%", dy: 18 }, written(step)));
    }
    svg.querySelector("desc").after(...grid);
    for (const layer of shown) if (layer.style === "dots") layer.at.forEach((at, i) => {
      if (at < view.from || at > view.to) return;
      svg.append(svgElement("circle", { class: "dot", cx: percent(inView(at)), cy: percent(1 - up(layer.y[i])), r: layer.at.length > 50 ? 2 : 3.5 }));
    });
    for (const { element, names, at } of marks) {
      element.style.display = at < view.from || at > view.to ? "none" : "";
      for (const name of names) element.setAttribute(name, percent(inView(at)));
    }
    for (const element of levels) {
      const y = up(Number(element.dataset.value));
      element.style.display = y < 0 || y > 1 ? "none" : "";
      for (const name of element.hasAttribute("y") ? ["y"] : ["y1", "y2"]) element.setAttribute(name, percent(1 - y));
    }
    reset.hidden = view.from === 0 && view.to === 1;
    hide();
  };

  const zoom = (from, to) => {
    const middle = (from + to) / 2, least = 2 / Math.max(layers[0].at.length, 2);
    if (to - from < least) [from, to] = [middle - least / 2, middle + least / 2];
    Object.assign(view, { from: clamp(from, 0, 1), to: clamp(to, 0, 1) });
    draw();
  };

  const tools = figure.querySelector("figcaption").appendChild(document.createElement("div"));
  tools.className = "tools";
  const button = (text, act) => {
    const made = tools.appendChild(document.createElement("button"));
    made.type = "button";
    made.textContent = text;
    made.addEventListener("click", act);
    return made;
  };
  const reset = button("whole run", () => zoom(0, 1));
  reset.hidden = true;
  const smoothing = tools.appendChild(document.createElement("select"));
  smoothing.setAttribute("aria-label", "smoothing");
  for (const [width, text] of [["", "smoothing as drawn"], ["0", "no smoothing"], ...[3, 9, 27, 81].map((n) => [n, "mean of " + n + " points"])]) {
    const option = smoothing.appendChild(document.createElement("option"));
    option.value = width;
    option.textContent = text;
  }
  smoothing.addEventListener("change", () => { view.width = smoothing.value; draw(); });
  const log = button("log axis", () => {
    view.log = !view.log;
    log.setAttribute("aria-pressed", view.log);
    draw();
  });
  log.setAttribute("aria-pressed", view.log);
  log.disabled = !layers.some((layer) => layer.y.some((value) => value > 0));

  plot.title = "drag to zoom; double-click for the whole run; keys: + - 0 and arrows";
  plot.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button === 0) drag = share(event);
    point(event);
  });
  window.addEventListener("pointerup", (event) => {
    if (drag === null) return;
    const ends = [drag, share(event)].sort((a, b) => a - b).map(toAxis);
    const isWide = !selection.hidden;
    drag = null;
    selection.hidden = true;
    if (isWide) zoom(...ends);
  });
  plot.addEventListener("dblclick", () => zoom(0, 1));
  plot.addEventListener("keydown", (event) => {
    const factor = { "+": 0.5, "-": 2 }[event.key], middle = clamp(shown[0].at[index], view.from, view.to);
    const half = (view.to - view.from) * factor / 2;
    if (event.key === "0") zoom(0, 1);
    if (factor) zoom(middle - half, middle + half);
  });
}
