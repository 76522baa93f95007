// The chosen theme, set before the first paint: a classic script, because modules run after it.
// main.js changes it; without a choice the system's holds.
(() => {
  const key = `torch_infini:${new URL(".", document.baseURI).pathname}:theme`;
  try {
    const theme = JSON.parse(localStorage.getItem(key));
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Without storage, or with another text in it, the system's theme holds.
  }
})();
