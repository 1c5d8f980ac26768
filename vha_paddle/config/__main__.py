"""`python -m vha_paddle.config` prints the JSON Schema of a recipe, for editors."""

import json

from vha_paddle.config.schema import Recipe

print(json.dumps(Recipe.model_json_schema(), indent=2))
