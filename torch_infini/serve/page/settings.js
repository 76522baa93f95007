// The dialog of settings. They are stored for all chats, but for the system prompt, which each chat has of its own, and
// the key, which sessionStorage forgets with the tab.

const element = (id) => document.getElementById(id);
const NAMES = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "reasoning_effort", "thinking", "stop"];

// Shows what the server takes where a setting is empty, by its GET /props.
export function showDefaults({ default_generation_settings: defaults, chat_template: template }) {
  const { params, n_ctx: context } = defaults;
  const shown = {
    temperature: params.temperature,
    top_p: params.top_p,
    top_k: params.top_k || "all",
    min_p: params.min_p,
    max_tokens: params.n_predict < 0 ? `what ${context} leave` : params.n_predict,
    seed: params.seed < 0 ? "random" : params.seed,
  };
  for (const [name, value] of Object.entries(shown)) element(name).placeholder = String(value);
  element("effort-field").hidden = !String(template).includes("reasoning_effort");
  element("thinking-field").hidden = !String(template).includes("enable_thinking");
}

// Opens the dialog with these values; `save` gets what was entered, {...settings, system, key}.
export function openSettings(values, save) {
  const dialog = element("settings");
  const form = dialog.querySelector("form");
  const { elements } = form;
  for (const name of [...NAMES, "system", "key"]) elements[name].value = values[name] ?? "";
  form.onsubmit = () => {
    const entered = [...NAMES, "system", "key"].map((name) => [name, elements[name].value]);
    save(Object.fromEntries(entered));
  };
  element("reset").onclick = () => NAMES.forEach((name) => (elements[name].value = ""));
  element("cancel-settings").onclick = () => dialog.close();
  dialog.showModal();
}
