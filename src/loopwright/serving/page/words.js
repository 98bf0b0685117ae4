// How things are called and counted for people.

const LABELS = {
  num_frames: "Frames",
  fps: "Frames a second",
  num_inference_steps: "Steps",
  guidance_scale: "Guidance",
  guidance_scale_2: "Guidance, second expert",
  negative_prompt: "Negative prompt",
  max_sequence_length: "Longest prompt, in tokens",
};

const STAGES = {
  text: "Reading the prompt",
  image: "Looking at the picture",
  encode: "Reading the file",
  denoise: "Denoising",
  decode: "Decoding",
};

export function label(name) {
  const words = name.replaceAll("_", " ");
  return LABELS[name] ?? words[0].toUpperCase() + words.slice(1);
}

export function stage(name) {
  return STAGES[name] ?? label(name);
}

export function duration(seconds) {
  if (seconds < 1) return "less than a second";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// What a job is doing, in one line.
export function doing(record, live) {
  const eta = live?.eta ?? record.eta;
  const left = eta ? [`about ${duration(eta)} left`] : [];
  if (live?.step) return [stage(live.stage), `step ${live.step} of ${live.steps}`, ...left].join(" · ");
  const next = live?.stage ? [`next: ${stage(live.stage).toLowerCase()}`] : [];
  return ["Waiting", ...next, ...left].join(" · ");
}

// What a result is, in one line.
export function facts(record) {
  const { width, height, num_frames: frames, fps, num_inference_steps: steps } = record.parameters;
  return [
    `${width} × ${height}`,
    frames === 1 ? "picture" : `${frames} frames at ${fps} a second`,
    `${steps} steps`,
    `guidance ${record.parameters.guidance_scale}`,
    `seed ${record.seed}`,
  ].join(" · ");
}
