
"use strict";
const PERIOD_MS = 2000;
const state = document.querySelector(".state");

function show(view) {
  for (const [name, text] of Object.entries(view.values)) {
    for (const element of document.querySelectorAll(`[data-value="${name}"]`)) element.textContent = text;
  }
  for (const [name, rows] of Object.entries(view.tables)) {
    document.querySelector(`[data-table="${name}"]`).replaceChildren(...rows.map((row) => {
      const line = document.createElement("tr");
      for (const text of row) line.appendChild(document.createElement("td")).textContent = text;
      return line;
    }));
    document.querySelector(`[data-empty="${name}"]`).hidden = rows.length > 0;
  }
  document.getElementById("chart").setAttribute("points", view.chart);
  state.dataset.kind = view.values.state === "serving" ? "good" : "bad";
}

async function refresh() {
  try {
    const answer = await fetch("status.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    show(await answer.json());
  } catch (error) {
    state.textContent = "not reachable";
    state.dataset.kind = "bad";
  }
  document.documentElement.dataset.refreshed = String(Number(document.documentElement.dataset.refreshed || 0) + 1);
  setTimeout(refresh, document.hidden ? 5 * PERIOD_MS : PERIOD_MS);
}

setTimeout(refresh, PERIOD_MS);
