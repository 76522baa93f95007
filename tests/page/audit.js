// Run in a page: returns sentences about elements without a name, headings out of order, ids that occur twice, weak
// contrast, targets that are too small and text that needs sideways scrolling (WCAG 2.2, level AA).
(() => {
  const faults = [];
  const nameOf = (node) => `<${node.tagName.toLowerCase()}${node.id ? ` id=${node.id}` : ""}>`;
  const modal = document.querySelector("dialog:modal");
  const all = [...(modal ?? document.body).querySelectorAll("*")].filter(
    (node) => node.checkVisibility({ visibilityProperty: true }) && (modal !== null || node.closest("dialog") === null),
  );

  // Names, and sizes of what can be pressed.
  const textOf = (ids) => ids.split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join(" ");
  for (const node of all) {
    const by = node.getAttribute("aria-labelledby");
    const label = [...(node.labels ?? [])].map((one) => one.textContent).join(" ");
    const isField = node.matches("input, select, textarea");
    const name = by ? textOf(by) : node.getAttribute("aria-label") ?? (isField ? label : node.textContent);
    const needsName = node.matches("button, a, input, select, textarea, summary, nav, section, article, dialog, [role=group]");
    if (needsName && name.trim() === "") faults.push(`${nameOf(node)} has no name`);
    for (const attribute of ["aria-labelledby", "aria-describedby", "aria-controls"]) {
      for (const id of node.getAttribute(attribute)?.split(" ") ?? []) {
        if (document.getElementById(id) === null) faults.push(`${nameOf(node)}: ${attribute} names no element: ${id}`);
      }
    }
    const { width, height } = node.getBoundingClientRect();
    const isTarget = node.matches("button, input, select, textarea, nav a");
    if (isTarget && Math.min(width, height) < 23.5) faults.push(`${nameOf(node)} is ${width} by ${height} px`);
  }

  // Ids, landmarks, headings, language.
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of new Set(ids.filter((id, at) => ids.indexOf(id) !== at))) faults.push(`the id ${id} occurs twice`);
  for (const tag of ["header", "main", "footer", "h1"]) {
    const count = document.querySelectorAll(tag).length;
    if (count !== 1) faults.push(`there are ${count} of ${tag}`);
  }
  const levels = all.filter((node) => /^H[1-6]$/.test(node.tagName)).map((node) => Number(node.tagName[1]));
  levels.forEach((level, at) => {
    if (at > 0 && level > levels[at - 1] + 1) faults.push(`a heading of level ${level} follows one of ${levels[at - 1]}`);
  });
  if (!document.documentElement.lang || !document.title) faults.push("there is no language or title");

  // Contrast of texts, and of the borders of fields.
  const parse = (color) => {
    const numbers = color.match(/[\d.]+/g).map(Number);
    return color.startsWith("color(") ? numbers.map((number, at) => (at < 3 ? number * 255 : number)) : numbers;
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((part) => {
      const c = part / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const backOf = (node) => {
    for (let at = node; at !== null; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if ((color[3] ?? 1) > 0) return color;
    }
    return [255, 255, 255];
  };
  for (const node of all) {
    if (node.closest(".unseen") !== null) continue;
    const style = getComputedStyle(node);
    const isField = node.matches("input, select, textarea");
    const hasText = [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim() !== "");
    const contrast = ratio(parse(style.color), backOf(node));
    if ((hasText || isField) && contrast < 4.5) faults.push(`${nameOf(node)}: the text's contrast is ${contrast.toFixed(2)}`);
    if (isField && node.placeholder) {
      const faint = ratio(parse(getComputedStyle(node, "::placeholder").color), backOf(node));
      if (faint < 4.5) faults.push(`${nameOf(node)}: the placeholder's contrast is ${faint.toFixed(2)}`);
    }
    const edge = ratio(parse(style.borderTopColor), backOf(node.parentElement ?? node));
    if (isField && edge < 3) faults.push(`${nameOf(node)}: the border's contrast is ${edge.toFixed(2)}`);
  }

  const { scrollWidth, clientWidth } = document.documentElement;
  if (scrollWidth > clientWidth) faults.push(`the page is ${scrollWidth} px wide in ${clientWidth}`);
  return faults;
})();
