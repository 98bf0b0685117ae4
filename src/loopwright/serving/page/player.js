// Results as pictures and videos, and several videos played in step.
//
//     const player = await media(library, record);
//     figure.append(player, together([player, other]));

import { button, element } from "./element.js";

const SMALL = 160; // pixels; a result below it is shown with its pixels sharp

export const calm = matchMedia("(prefers-reduced-motion: reduce)");

export function still(record) {
  return record.parameters.num_frames === 1;
}

export function sharp(record) {
  return record.parameters.width < SMALL ? "sharp" : "";
}

export async function media(library, record, properties = {}) {
  const src = await library.address(record.id);
  const { width, height } = record.parameters;
  const shared = { src, width, height, className: sharp(record) };
  if (still(record)) return element("img", { ...shared, alt: record.prompt });
  return element("video", { ...shared, muted: true, loop: true, playsInline: true, "aria-label": record.prompt, ...properties });
}

// One control for all of them: the first leads, the others are kept at its time.
export function together(videos) {
  const [leader, ...others] = videos;
  const place = element("input", { type: "range", min: 0, max: 1, step: 0.001, value: 0, "aria-label": "Time in both" });
  const toggle = button("Pause both", () => (leader.paused ? play() : pause()));

  function play() {
    for (const video of videos) video.play();
    toggle.textContent = "Pause both";
  }

  function pause() {
    for (const video of videos) video.pause();
    toggle.textContent = "Play both";
    align(0);
  }

  function align(slack) {
    for (const video of others) {
      const time = Math.min(leader.currentTime, video.duration || 0);
      if (Math.abs(video.currentTime - time) > slack) video.currentTime = time;
    }
  }

  function follow() {
    if (!leader.isConnected) return;
    if (!leader.paused && !leader.seeking) {
      align(0.12);
      place.value = leader.currentTime / (leader.duration || 1);
    }
    requestAnimationFrame(follow);
  }

  place.oninput = () => {
    pause();
    leader.currentTime = place.value * (leader.duration || 0);
    leader.onseeked = () => align(0);
  };
  requestAnimationFrame(follow);
  if (calm.matches) pause();
  else play();
  return element("div", { className: "actions together" }, toggle, place);
}
