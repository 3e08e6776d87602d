"""Charts for papers, drawn with Matplotlib."""
