// What console.py puts into a page: it notes long tasks, points that arrive, strokes on the chart of the loss.

window.longest = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.longest = Math.max(window.longest, entry.duration);
}).observe({ type: "longtask", buffered: true });

window.arrived = [];
window.drawn = [];
MessagePort.prototype.addEventListener = function (kind, act, ...rest) {
  const noted = (event) => {
    if (event.data?.kind === "points") window.arrived.push([event.data.data.x.step, Date.now()]);
    act(event);
  };
  return EventTarget.prototype.addEventListener.call(this, kind, kind === "message" ? noted : act, ...rest);
};
const stroke = CanvasRenderingContext2D.prototype.stroke;
CanvasRenderingContext2D.prototype.stroke = function (...words) {
  if (this.canvas.closest?.("#loss")) window.drawn.push(Date.now());
  return stroke.apply(this, words);
};

const awaited = () => {
  if (document.querySelector(".runs .name a")) window.tableAt = performance.now();
  else requestAnimationFrame(awaited);
};
requestAnimationFrame(awaited);

// Go to a view; resolve to the ms until it is shown and the next picture is due.
window.show = (hash, isShown) => new Promise((done) => {
  window.drawn = [];
  const begin = performance.now();
  const look = () => requestAnimationFrame(isShown() ? () => done(performance.now() - begin) : look);
  location.hash = hash;
  look();
});

// Scroll the table to its end, and back.
window.scrollTable = () => new Promise((done) => {
  const view = document.querySelector(".runs-scroll");
  let by = 300;
  const step = () => {
    const before = view.scrollTop;
    view.scrollTop += by;
    if (view.scrollTop !== before) return requestAnimationFrame(step);
    if (by < 0) return setTimeout(done, 200);
    by = -700;
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
});

// Draw the heat map again; return the ms.
window.redraw = () => {
  const canvas = document.querySelector(".ranks canvas[aria-label]"), begin = performance.now();
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  canvas.getContext("2d").getImageData(0, 0, 1, 1);
  return performance.now() - begin;
};
