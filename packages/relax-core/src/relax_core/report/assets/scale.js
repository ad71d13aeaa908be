// Numbers: what JSON lacks, how they read, and round values for axes.

// Python wrote NaN and infinities as text.
const toNumber = (value) => (value === null || value === undefined || value === "" ? NaN : Number(value));

function format(value, digits = 4) {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}K`;
  if (size !== 0 && size < 1e-4) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

function duration(seconds) {
  const whole = Math.round(seconds);
  const pad = (part) => String(part).padStart(2, "0");
  const [hour, minute, second] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  if (hour) return `${hour}:${pad(minute)}:${pad(second)} h`;
  return minute ? `${minute}:${pad(second)} min` : `${format(seconds, 3)} s`;
}

// Round values that cover [low, high]; `whole` keeps to integers.
function ticks(low, high, count, whole = false) {
  const raw = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw * 0.999);
  if (whole) step = Math.max(1, Math.ceil(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step);
  return found;
}

// An axis from data in [low, high] to pixels in [from, to], with air around data that is flat but for rounding.
function axis(low, high, from, to) {
  if (!(high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high)))) {
    const air = Math.abs(low) * 0.1;
    [low, high] = air ? [low - air, high + air] : [0, 1];
  }
  const place = (value) => from + ((value - low) / (high - low)) * (to - from);
  place.low = low;
  place.high = high;
  place.invert = (pixel) => low + ((pixel - from) / (to - from)) * (high - low);
  return place;
}

// Exponential moving average with bias correction; gaps stay gaps.
function smooth(points, weight) {
  let [sum, norm] = [0, 0];
  return points.map(([x, y]) => {
    if (!Number.isFinite(y)) return [x, y];
    sum = weight * sum + (1 - weight) * y;
    norm = weight * norm + (1 - weight);
    return [x, sum / norm];
  });
}
