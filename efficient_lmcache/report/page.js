"use strict";
// Draws every figure of #figures into the element of its name, in the colours that page.css names.
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  // A finger that moves over a plot scrolls the page.
  const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";

  // "@name" under a key that ends in "color" stands for the colour --name.
  function coloured(value, styles, key = "") {
    if (Array.isArray(value)) return value.map((item) => coloured(item, styles, key));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, coloured(item, styles, name)]));
    if (typeof value === "string" && value[0] === "@" && /color$/.test(key))
      return styles.getPropertyValue("--" + value.slice(1)).trim();
    return value;
  }

  function dressed(layout) {
    const family = getComputedStyle(document.body).fontFamily;
    const base = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode, hovermode: "closest", showlegend: false,
      margin: { l: 8, r: 12, t: 10, b: 8 }, autosize: true, bargap: 0.35,
      font: { family, size: 12.5, color: "@quiet" },
      hoverlabel: { bgcolor: "@hover", bordercolor: "@hover", align: "left", font: { family, color: "@hover-ink", size: 12.5 } },
    };
    const axis = { automargin: true, gridcolor: "@grid", linecolor: "@line", zeroline: false, ticks: "", fixedrange: !dragmode };
    const titled = (own) => ({ ...axis, ...own, title: { standoff: 10, font: { size: 12.5 }, ...(own.title || {}) } });
    return { ...base, ...layout, xaxis: titled({ showgrid: false, showline: true, ...layout.xaxis }), yaxis: titled(layout.yaxis || {}) };
  }

  function draw(name, styles) {
    const { data, layout } = figures[name];
    const options = { responsive: true, displayModeBar: false, showTips: false };
    return Plotly.react(name, coloured(data, styles), coloured(dressed(layout), styles), options);
  }

  // At once, because printing does not wait.
  function redraw() {
    const styles = getComputedStyle(root);
    for (const name of Object.keys(figures)) draw(name, styles);
  }

  async function drawFirst() {
    for (const name of Object.keys(figures)) {
      await draw(name, getComputedStyle(root));
      await new Promise((rest) => setTimeout(rest));  // the page can be scrolled meanwhile
    }
  }

  function linked() {
    for (const name of Object.keys(figures)) {
      const plot = document.getElementById(name);
      const target = (event) => event.points[0].customdata;
      plot.on("plotly_click", (event) => { if (target(event)) window.open(target(event), "_blank", "noopener"); });
      plot.on("plotly_hover", (event) => { if (target(event)) plot.classList.add("linked"); });
      plot.on("plotly_unhover", () => plot.classList.remove("linked"));
    }
  }

  async function library() {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  }

  library().then(drawFirst).then(linked).then(() => {
    root.dataset.drawn = "yes";
    dark.addEventListener("change", redraw);
    addEventListener("beforeprint", () => { root.dataset.theme = "light"; redraw(); });
    addEventListener("afterprint", () => { delete root.dataset.theme; redraw(); });
  }).catch((error) => {
    console.error(error);
    document.getElementById("undrawn").hidden = false;
  });
})();
