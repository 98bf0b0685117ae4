// Elements made from plain values. Text goes in as text, never as HTML.
//
//     element("button", { type: "button", onclick: stop }, "Cancel")

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function button(text, onclick, properties = {}) {
  return element("button", { type: "button", onclick, ...properties }, text);
}

// Told to whoever listens to the page instead of looking at it.
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}
