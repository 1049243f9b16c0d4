// Light, dark, or as the system: applied before the page is drawn, so that it never flashes in the wrong colours.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const theme = {
    names: ["auto", "light", "dark"],
    read() {
      let kept = null;
      try {
        kept = localStorage.getItem("tidar.theme");
      } catch {
        // Storage is closed to this page: follow the system.
      }
      return theme.names.includes(kept) ? kept : "auto";
    },
    write(name) {
      try {
        localStorage.setItem("tidar.theme", name);
      } catch {
        // As above: the choice lasts as long as the page.
      }
      theme.apply(name);
    },
    apply(name = theme.read()) {
      const dark = name === "dark" || (name === "auto" && system.matches);
      document.documentElement.dataset.theme = dark ? "dark" : "light";
      document.body?.classList.toggle("dark", dark); // Gradio's own parts read this class
    },
  };
  system.addEventListener("change", () => theme.apply());
  window.tidarTheme = theme;
  theme.apply();
})();
