// A field above each table of more than 50 rows: only rows that contain all of its words are shown.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length <= 50) continue;
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const field = Object.assign(document.createElement("input"), {
    type: "search",
    className: "md-input md-input--stretch",
    placeholder: `Filter ${rows.length} rows, for example: ${rows[0].cells[0].textContent}`,
  });
  field.setAttribute("aria-label", "Filter the rows of the table");
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    rows.forEach((row, i) => (row.hidden = !words.every((word) => texts[i].includes(word))));
  });
  // Material may have wrapped the table already.
  (table.closest(".md-typeset__scrollwrap") ?? table).before(field);
}
