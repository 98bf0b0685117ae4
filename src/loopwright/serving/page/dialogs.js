// Questions that come before the page goes on.
//
//     if (await confirmed("Delete this video?", "Delete")) ...

import { button, element } from "./element.js";

export function confirmed(question, yes) {
  return new Promise((resolve) => {
    const dialog = element("dialog", { onclose: () => (dialog.remove(), resolve(dialog.returnValue === "yes")) });
    dialog.append(
      element("p", {}, question),
      element("div", { className: "actions" },
        button("Keep", () => dialog.close(""), { autofocus: true }),
        button(yes, () => dialog.close("yes"), { className: "danger" })),
    );
    document.body.append(dialog);
    dialog.showModal();
  });
}

export function askForKey(wrong) {
  return new Promise((resolve) => {
    const input = element("input", { id: "key", type: "password", autocomplete: "off", required: true });
    const form = element("form", {
      onsubmit: (event) => {
        event.preventDefault();
        if (input.value.trim()) dialog.close();
      },
    },
      element("label", { htmlFor: "key" }, "This server asks for an API key"),
      input,
      element("p", { className: wrong ? "refused" : "hint" },
        wrong ? "The server does not know this key." : "It is kept until this tab is closed, and sent to this server alone."),
      element("div", { className: "actions" }, element("button", { className: "main" }, "Continue")));
    const dialog = element("dialog", {
      oncancel: (event) => event.preventDefault(),
      onclose: () => (dialog.remove(), resolve(input.value.trim())),
    }, form);
    document.body.append(dialog);
    dialog.showModal();
  });
}
