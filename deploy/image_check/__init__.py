"""`make image-check`: build every image, start the demo images' own programs and generate a text through them."""
