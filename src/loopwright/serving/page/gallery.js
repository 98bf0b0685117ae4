// What has been made, newest first. Files are fetched when they come into view.
//
//     const gallery = new Gallery(document.getElementById("gallery"), library, actions);
//     gallery.draw()

import { element } from "./element.js";
import { calm, media } from "./player.js";
import { facts } from "./words.js";

export class Gallery {
  cards = new Map();

  constructor(root, library, actions) {
    Object.assign(this, { root, library, actions });
    this.list = root.querySelector("ul");
    this.empty = root.querySelector(".empty");
    this.older = root.querySelector("#older");
    this.older.onclick = () => actions.older();
    this.seen = new IntersectionObserver((entries) => this.#see(entries), { rootMargin: "200px" });
  }

  draw() {
    const finished = this.library.finished;
    this.empty.hidden = finished.length > 0;
    this.older.hidden = !this.library.more;
    for (const [id, card] of this.cards) {
      if (!this.library.records.has(id)) {
        card.remove();
        this.cards.delete(id);
      }
    }
    finished.forEach((record, place) => {
      const card = this.cards.get(record.id) ?? this.#add(record);
      if (this.list.children[place] !== card) this.list.insertBefore(card, this.list.children[place] ?? null);
    });
  }

  #add(record) {
    const { width, height } = record.parameters;
    const frame = element("span", { className: "frame" });
    frame.style.aspectRatio = `${width} / ${height}`;
    const open = element("button", { type: "button", title: facts(record), onclick: () => this.actions.show(record.id) },
      frame, element("span", { className: "prompt" }, record.prompt));
    const card = element("li", {}, open);
    card.dataset.id = record.id;
    this.cards.set(record.id, card);
    this.seen.observe(card);
    return card;
  }

  #see(entries) {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      this.seen.unobserve(target);
      this.#fill(target, this.library.records.get(target.dataset.id));
    }
  }

  async #fill(card, record) {
    const frame = card.querySelector(".frame");
    try {
      const shown = await media(this.library, record, { tabIndex: -1 });
      frame.replaceChildren(shown);
      if (shown.play && !calm.matches) moveWhile(card, shown);
    } catch (error) {
      frame.textContent = error.message;
    }
  }
}

// Moves while it is pointed at or has the focus.
function moveWhile(card, video) {
  for (const name of ["pointerenter", "focusin"]) card.addEventListener(name, () => video.play().catch(() => {}));
  for (const name of ["pointerleave", "focusout"]) card.addEventListener(name, () => video.pause());
}
