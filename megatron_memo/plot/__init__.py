"""Pictures of plans and estimates: as PNG and SVG, and as pages that work without a network."""
