// Servers of the command line: their /metrics pages, asked every other second while this view is open.

import * as api from "./api.js";
import { el, failure } from "../charts/dom.js";
import { takeAlong } from "./take.js";
import { Chart } from "../charts/charts.js";

const EVERY_MS = 2000, MOST_POINTS = 3600;

export async function open() {
  const { servers, charts } = await api.servers();
  const views = servers.map((server, i) => new ServerView(server, i, charts));
  const root = el("div", { class: "page" }, el("div", { class: "title" }, el("h1", {}, "Servers"), servers.length ? takeAlong((form) => `api/servers.${form}`) : ""),
    servers.length ? views.map((view) => view.root) : el("p", { class: "empty" }, "This console watches no server. Start it with --server URL."));
  return {
    root,
    places: [["#/", "Runs"], ["", "Servers"]],
    begin: () => { for (const view of views) view.run(); },
    close: () => { for (const view of views) view.close(); },
  };
}

class ServerView {
  /** kinds: what is drawn of each point: options of a chart, and `of`: [field, label, colour] of its lines. */
  constructor(server, number, kinds) {
    Object.assign(this, { number, kinds, points: [], charts: [] });
    this.said = el("p", { class: "quiet", role: "status" }, "Asking\u2026");
    this.places = kinds.map(() => el("div", { class: "place" }));
    this.root = el("section", { class: "view", "aria-label": server.name }, el("h2", {}, server.name, " ", el("small", {}, server.url)), this.said, el("div", { class: "charts" }, this.places));
  }

  async run() {
    const last = this.points.length ? this.points[this.points.length - 1].time : -1;
    try {
      const found = await api.server(this.number, last);
      if (this.isClosed) return;
      this.points = [...this.points, ...found.points].slice(-MOST_POINTS);
      if (found.error) this.said.replaceChildren(failure(new Error(found.error)));
      else this.said.textContent = this.points.length < 2 ? "Rates appear with the second reading." : "";
      this.#draw();
    } catch (error) {
      this.said.replaceChildren(failure(error));
    }
    if (!this.isClosed) this.timer = setTimeout(() => this.run(), EVERY_MS);
  }

  #draw() {
    if (!this.points.length) return;
    const first = this.points[0].time;
    for (const [i, { of, ...chart }] of this.kinds.entries()) {
      const layers = of.map(([field, name, color]) => {
        const known = this.points.filter((point) => point[field] !== null && point[field] !== undefined);
        return { name, color, style: "line", x: known.map(({ time }) => time - first), y: known.map((point) => point[field]) };
      });
      const id = `${chart.id}-${this.number}`, drawn = this.charts.find((one) => one.options.id === id);
      if (drawn) drawn.setLayers(layers);
      else if (layers.some(({ x }) => x.length)) this.charts.push(new Chart(this.places[i], { height: 190, ...chart, id, along: "time", layers, sync: `server-${this.number}` }));
    }
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    for (const chart of this.charts) chart.destroy();
  }
}
