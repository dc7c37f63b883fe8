"""Whether the arithmetic of a run is right here, on its engine and in its layout."""
