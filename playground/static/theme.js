// Light, dark, or as the system: applied before the page is drawn, so that it never flashes in the wrong colours.
(() => {
  const names = ["auto", "light", "dark"];
  const system = matchMedia("(prefers-color-scheme: dark)");
  let name = "auto";
  try {
    const kept = localStorage.getItem("tidar.theme");
    if (names.includes(kept)) name = kept;
  } catch {
    // Storage is closed to this page: follow the system.
  }
  const theme = {
    get name() {
      return name;
    },
    apply() {
      const dark = name === "dark" || (name === "auto" && system.matches);
      document.documentElement.dataset.theme = dark ? "dark" : "light";
      document.body?.classList.toggle("dark", dark); // Gradio's own parts read this class
    },
    next() {
      name = names[(names.indexOf(name) + 1) % names.length];
      try {
        localStorage.setItem("tidar.theme", name);
      } catch {
        // As above: the choice lasts as long as the page.
      }
      theme.apply();
    },
  };
  system.addEventListener("change", theme.apply);
  window.tidarTheme = theme;
  theme.apply();
})();
