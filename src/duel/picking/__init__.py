"""Of many pictures those that are unlike each other: `duel pick`. Nothing is trained; thumbnails say what is alike."""
