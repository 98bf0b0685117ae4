// One job from its beginning to its result, and what can be done with it.
//
//     const pane = new Pane(library, id, actions);
//     viewer.append(pane.element);
//     pane.draw()                                 // when the library has changed

import { button, element } from "./element.js";
import { media, sharp, still } from "./player.js";
import { doing, facts } from "./words.js";

export class Pane {
  constructor(library, id, actions, { controls = true, caption = "" } = {}) {
    Object.assign(this, { library, id, actions, controls });
    this.body = element("div", { className: "body" });
    this.element = element("article", { className: "pane" }, this.body);
    if (caption) this.element.prepend(element("h3", {}, caption));
    this.player = null;
    this.drawn = "";
  }

  get record() {
    return this.library.records.get(this.id);
  }

  draw() {
    const status = this.record.status === "queued" ? "in_progress" : this.record.status;
    if (status !== this.drawn) {
      this.drawn = status;
      this.element.dataset.status = status;
      this.body.replaceChildren(...this.#parts(status));
    }
    if (status === "in_progress") this.#progress();
  }

  #parts(status) {
    const prompt = element("p", { className: "prompt" }, this.record.prompt);
    const rest = [prompt, element("p", { className: "hint" }, facts(this.record))];
    if (status === "in_progress") return [this.#waiting(), ...rest, this.#row(button("Cancel", () => this.actions.cancel(this.id)))];
    if (status === "completed") return [this.#made(), ...rest, this.#row(...this.#offers())];
    const why = status === "cancelled" ? "Cancelled." : `It failed: ${this.record.error?.message ?? "no reason was given"}`;
    return [element("p", { className: status === "cancelled" ? "hint" : "refused" }, why), ...rest, this.#row(this.#again(), this.#use(), this.#delete())];
  }

  #waiting() {
    const { width, height } = this.record.parameters;
    this.meter = element("progress", { max: 100, "aria-label": "Progress" });
    this.line = element("p", { className: "doing" });
    this.glimpse = element("img", { hidden: true, alt: "A preview of what it will be", className: sharp(this.record) });
    const room = element("div", { className: "room" }, this.glimpse);
    room.style.aspectRatio = `${width} / ${height}`;
    return element("div", { className: "waiting" }, room, this.line, this.meter);
  }

  #progress() {
    const live = this.library.live.get(this.id);
    this.meter.value = live?.progress ?? this.record.progress;
    this.line.textContent = doing(this.record, live);
    if (live?.stage === "denoise" && live.step) this.#glimpse();
  }

  // One at a time, for a third of the time at most, and only while somebody looks. Without one the pane is as it was.
  async #glimpse() {
    if (this.glimpsing || document.hidden) return;
    this.glimpsing = true;
    const begun = performance.now();
    const blob = await this.library.server.preview(this.id).catch(() => null);
    if (blob && this.drawn === "in_progress") this.#look(URL.createObjectURL(blob));
    setTimeout(() => (this.glimpsing = false), Math.max(400, 2 * (performance.now() - begun)));
  }

  #look(address) {
    const before = this.glimpse.src;
    this.glimpse.hidden = false;
    this.glimpse.onload = () => before && URL.revokeObjectURL(before);
    this.glimpse.src = address;
  }

  #made() {
    const frame = element("div", { className: "frame" });
    this.player = media(this.library, this.record, { controls: this.controls });
    this.player.then((shown) => {
      frame.append(shown);
      if (this.controls && !still(this.record)) shown.play().catch(() => {}); // where browsers forbid it, its button is there
    }, (error) => frame.append(element("p", { className: "refused" }, error.message)));
    return frame;
  }

  #offers() {
    const name = `${this.id}${still(this.record) ? ".png" : ".mp4"}`;
    const download = element("a", { className: "button", download: name }, "Download");
    this.library.address(this.id).then((address) => (download.href = address), () => download.remove());
    return [download, this.#again(), this.#use(), this.#delete()];
  }

  #again() {
    return button("Same seed again", () => this.actions.again(this.record));
  }

  #use() {
    return button("Use these settings", () => this.actions.use(this.record));
  }

  #delete() {
    return button("Delete", () => this.actions.remove(this.record), { className: "danger" });
  }

  #row(...children) {
    return element("div", { className: "actions" }, ...children);
  }
}
