"use strict";
(async () => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const charts = [...document.querySelectorAll(".chart")];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 560px)");
  const mouse = matchMedia("(hover: hover)");

  const copy = document.getElementById("copy");
  copy.hidden = false;
  copy.addEventListener("click", async () => {
    const command = document.getElementById("command");
    try {
      await navigator.clipboard.writeText(command.textContent);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(command); // where the clipboard is closed to pages
      copy.textContent = "Selected";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });

  // What is wider than its place can be scrolled, and says so.
  for (const place of document.querySelectorAll(".scroll")) {
    const more = document.createElement("p");
    more.className = "more";
    more.textContent = "more columns to the right: scroll →";
    place.before(more);
    const tell = () => { more.hidden = place.scrollWidth <= place.clientWidth; };
    tell();
    new ResizeObserver(tell).observe(place);
  }

  if (typeof DecompressionStream === "undefined") {
    for (const chart of charts) {
      chart.innerHTML = '<p class="missing">This chart needs a browser of 2023 or later. ' +
        "Every number is in the tables of this page.</p>";
    }
    return;
  }
  const packed = Uint8Array.from(
    atob(document.getElementById("plotly").textContent), (sign) => sign.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);

  // One byte a cell becomes rows of kinds and rows of their names.
  for (const figure of Object.values(figures)) {
    for (const trace of figure.data) {
      if (!trace.cells) continue;
      const { rows, columns, base64, names } = trace.cells;
      const cells = Uint8Array.from(atob(base64), (sign) => sign.charCodeAt(0));
      trace.z = Array.from({ length: rows }, (_, i) => cells.subarray(i * columns, (i + 1) * columns));
      trace.text = trace.z.map((row) => Array.from(row, (kind) => names[kind]));
      delete trace.cells;
    }
  }

  const coloured = (value, style) => {
    if (typeof value === "string") {
      return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
    }
    if (Array.isArray(value)) {
      const numbers = typeof value.at(-1) === "number" || value.at(-1) === null;
      return numbers ? value : value.map((item) => coloured(item, style));
    }
    if (value && typeof value === "object" && !ArrayBuffer.isView(value)) {
      return Object.fromEntries(
        Object.entries(value).map(([key, item]) => [key, coloured(item, style)]));
    }
    return value;
  };

  const axis = (given, style) => ({
    gridcolor: style.getPropertyValue("--grid").trim(),
    zerolinecolor: style.getPropertyValue("--line").trim(),
    linecolor: style.getPropertyValue("--line").trim(),
    tickcolor: style.getPropertyValue("--line").trim(),
    ...given,
    ...(narrow.matches && given.nticks ? { nticks: Math.min(given.nticks, 5) } : {}),
    title: { font: { size: 12.5 }, standoff: 8, ...given.title },
  });

  const draw = async () => {
    const style = getComputedStyle(root);
    for (const chart of charts) {
      const figure = figures[chart.id];
      const given = coloured(figure.layout, style);
      const layout = {
        paper_bgcolor: style.getPropertyValue("--card").trim(),
        plot_bgcolor: style.getPropertyValue("--card").trim(),
        modebar: {
          bgcolor: style.getPropertyValue("--card").trim(),
          color: style.getPropertyValue("--muted").trim(),
          activecolor: style.getPropertyValue("--accent").trim(),
        },
        font: {
          family: getComputedStyle(document.body).fontFamily,
          size: narrow.matches ? 11.5 : 13,
          color: style.getPropertyValue("--muted").trim(),
        },
        hoverlabel: {
          bgcolor: style.getPropertyValue("--card").trim(),
          bordercolor: style.getPropertyValue("--line").trim(),
          font: { color: style.getPropertyValue("--ink").trim() },
          align: "left",
        },
        showlegend: false,
        autosize: true,
        uirevision: "keep", // a change of colours keeps what was zoomed to
        dragmode: mouse.matches ? "zoom" : false, // a finger scrolls the page
        ...given,
      };
      for (const name of ["xaxis", "yaxis", "xaxis2"]) {
        if (given[name]) layout[name] = axis(given[name], style);
      }
      await Plotly.react(chart, coloured(figure.data, style), layout, {
        responsive: true,
        displaylogo: false,
        displayModeBar: mouse.matches ? "hover" : false,
        // named one by one: by default there is a button that sends the chart to a server
        modeBarButtons: [figure.layout.xaxis.fixedrange
          ? ["toImage"] : ["zoom2d", "pan2d", "resetScale2d", "toImage"]],
        showSendToCloud: false,
        plotlyServerURL: "",
      });
    }
  };
  await draw();

  // Charts over the same time zoom together, so that what is side by side stays comparable.
  const linked = charts.filter((chart) => chart.dataset.link === "time");
  let following = false;
  for (const chart of linked) {
    chart.on("plotly_relayout", async (change) => {
      if (following || !Object.keys(change).some((key) => key.startsWith("xaxis."))) return;
      following = true;
      const range = [...chart.layout.xaxis.range];
      await Promise.all(linked.filter((other) => other !== chart)
        .map((other) => Plotly.relayout(other, { "xaxis.range": range })));
      following = false;
    });
  }
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  root.dataset.charts = "drawn";
})().catch((error) => {
  document.documentElement.dataset.charts = "failed";
  throw error;
});
