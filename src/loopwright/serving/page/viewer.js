// What is looked at: one job, or two side by side.
//
//     viewer.show([first.id, second.id], ["4 steps", "8 steps"]);

import { element } from "./element.js";
import { Pane } from "./pane.js";
import { still, together } from "./player.js";

export class Viewer {
  panes = [];
  joined = true;

  constructor(root, library, actions) {
    Object.assign(this, { root, library, actions });
    this.empty = root.querySelector(".empty");
  }

  show(ids, captions = []) {
    const alone = ids.length === 1;
    this.panes = ids.map((id, i) => new Pane(this.library, id, this.actions, { controls: alone, caption: captions[i] }));
    this.side = element("div", { className: alone ? "alone" : "side" }, ...this.panes.map((pane) => pane.element));
    this.root.replaceChildren(this.side);
    this.joined = alone;
    this.draw();
  }

  draw() {
    if (this.panes.some((pane) => !pane.record)) {
      this.panes = this.panes.filter((pane) => pane.record);
      if (this.panes.length) this.show(this.panes.map((pane) => pane.id));
      else this.root.replaceChildren(this.empty);
      return;
    }
    for (const pane of this.panes) pane.draw();
    this.#join();
  }

  // Two videos get one control as soon as both are there.
  async #join() {
    const done = this.panes.every(({ record }) => record.status === "completed" && !still(record));
    if (this.joined || !done) return;
    this.joined = true;
    const { side } = this;
    const videos = await Promise.all(this.panes.map((pane) => pane.player));
    if (side.isConnected) side.after(together(videos));
  }
}
