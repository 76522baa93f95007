// Images of a message that is not sent yet: chosen, pasted or dropped, made small, each with a button that removes it.

import { button, make } from "./view.js";

const SIDE = 1280; // pixels of the longer side: models make few tokens of more, and storage holds few megabytes
const QUALITY = 0.9;

// Returns a file's image as a data URL, upright and not larger than SIDE.
export async function urlOf(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, SIDE / Math.max(image.width, image.height));
  const width = Math.max(1, Math.round(image.width * scale));
  const height = Math.max(1, Math.round(image.height * scale));
  const canvas = make("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, width, height);
  context.drawImage(image, 0, 0, width, height);
  image.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}

// Keeps the images of the next message, and shows them in `list`; `failed` gets a sentence.
export class Attached {
  #list;
  #failed;
  #urls = [];

  constructor(list, failed) {
    this.#list = list;
    this.#failed = failed;
  }

  get count() {
    return this.#urls.length;
  }

  async add(files) {
    for (const file of files) {
      if (!file.type.startsWith("image/")) continue;
      try {
        this.#urls.push(await urlOf(file));
      } catch {
        this.#failed(`This browser reads no image from “${file.name}”.`);
      }
    }
    this.#show();
  }

  // Returns the images, and forgets them.
  take() {
    const urls = this.#urls;
    this.#urls = [];
    this.#show();
    return urls;
  }

  #show() {
    const items = this.#urls.map((src, at) => {
      const remove = button(`Remove image ${at + 1}`, () => {
        this.#urls.splice(at, 1);
        this.#show();
      });
      return make("li", {}, make("img", { src, alt: `Image ${at + 1} of the next message` }), remove);
    });
    this.#list.replaceChildren(...items);
    this.#list.hidden = items.length === 0;
  }
}
