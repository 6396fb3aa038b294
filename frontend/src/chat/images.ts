/** Pictures from the clipboard, from files and from elsewhere, as data URLs. */

const KINDS = ['image/png', 'image/jpeg', 'image/webp', 'image/gif'];
const LONGEST_SIDE = 2048;

export function pictures(data: DataTransfer | null): File[] {
  return [...(data?.files ?? [])].filter((file) => KINDS.includes(file.type));
}

/** A file's picture as a data URL; one with a longer side than 2048 is made smaller first. */
export async function dataUrl(file: File): Promise<string> {
  const bitmap = await createImageBitmap(file);
  const factor = LONGEST_SIDE / Math.max(bitmap.width, bitmap.height);
  if (factor >= 1) {
    bitmap.close();
    return read(file);
  }
  const canvas = document.createElement('canvas');
  canvas.width = Math.round(bitmap.width * factor);
  canvas.height = Math.round(bitmap.height * factor);
  canvas.getContext('2d')!.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL('image/jpeg', 0.9);
}

function read(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
