// The dialog that asks for a name, a key or a confirmation.

const element = (id) => document.getElementById(id);

// Shows the dialog and returns what was entered, or null if it was cancelled. Without `label` there is nothing to
// enter, and the value is "".
export function ask({ title, text = "", label = "", value = "", type = "text", ok }) {
  const [dialog, field] = [element("ask"), element("ask-value")];
  if (dialog.open) return Promise.resolve(null);
  element("ask-title").textContent = title;
  element("ask-text").textContent = text;
  element("ask-label").textContent = label;
  element("ask-field").hidden = label === "";
  element("ask-ok").textContent = ok;
  Object.assign(field, { type, value, required: label !== "" });
  return new Promise((resolve) => {
    let result = null;
    dialog.querySelector("form").onsubmit = () => (result = field.value);
    element("ask-cancel").onclick = () => dialog.close();
    dialog.onclose = () => {
      field.value = "";
      resolve(result);
    };
    dialog.showModal();
    (label === "" ? element("ask-ok") : field).focus();
  });
}

// Copies a text; returns whether the browser allowed it. Its clipboard is missing outside of HTTPS and localhost.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    const focused = document.activeElement;
    area.value = text;
    area.className = "unseen";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return done;
  }
}
