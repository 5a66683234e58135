// Light, dark, or what the system has; remembered by the browser.

const STORED = "specdec-theme";

export function followTheme(select) {
  select.value = stored() ?? "system";
  apply(select.value);
  select.addEventListener("change", () => {
    apply(select.value);
    store(select.value);
  });
}

function apply(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

function stored() {
  try {
    return localStorage.getItem(STORED);
  } catch {
    return null; // a browser may refuse to store
  }
}

function store(theme) {
  try {
    localStorage.setItem(STORED, theme);
  } catch {
    // it holds for this visit
  }
}
