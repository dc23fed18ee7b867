//! A small line plot as SVG: sizes on a logarithmic axis, cost from zero.

use std::fmt::Write;

use crate::growth::Growth;
use crate::report::shown;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 52.0;

/// The plot of one growth.
pub(crate) fn svg(growth: &Growth) -> Result<String, std::fmt::Error> {
    let sizes: Vec<f64> = growth.points.iter().map(|(size, _)| (*size as f64).log10()).collect();
    let (first, last) = (sizes[0], sizes[sizes.len() - 1]);
    let most = growth.points.iter().map(|(_, cost)| *cost).fold(0.0, f64::max) * 1.25;
    let x = |size: f64| LEFT + (size - first) / (last - first) * (WIDTH - LEFT - RIGHT);
    let y = |cost: f64| HEIGHT - BOTTOM - cost / most * (HEIGHT - TOP - BOTTOM);
    let mut out = String::new();
    writeln!(
        out,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="#fff"/>
<text x="{LEFT}" y="20" font-size="14" fill="#111">µs for {}</text>"##,
        growth.name
    )?;
    for part in 0..=4 {
        let cost = most * f64::from(part) / 4.0;
        let at = y(cost);
        writeln!(out, r##"<line x1="{LEFT}" x2="{}" y1="{at:.1}" y2="{at:.1}" stroke="#ddd"/>"##, WIDTH - RIGHT)?;
        let label = if part == 0 { "0".to_owned() } else { shown(cost) };
        let text = LEFT - 8.0;
        writeln!(out, r##"<text x="{text}" y="{:.1}" text-anchor="end" fill="#555">{label}</text>"##, at + 4.0)?;
    }
    let line: Vec<String> =
        growth.points.iter().zip(&sizes).map(|((_, cost), size)| format!("{:.1},{:.1}", x(*size), y(*cost))).collect();
    writeln!(out, r##"<polyline points="{}" fill="none" stroke="#1769aa" stroke-width="2"/>"##, line.join(" "))?;
    for ((size, cost), at) in growth.points.iter().zip(&sizes) {
        let (cx, cy) = (x(*at), y(*cost));
        writeln!(out, r##"<circle cx="{cx:.1}" cy="{cy:.1}" r="3.5" fill="#1769aa"/>"##)?;
        let (above, below) = (cy - 9.0, HEIGHT - BOTTOM + 18.0);
        writeln!(
            out,
            r##"<text x="{cx:.1}" y="{above:.1}" text-anchor="middle" fill="#111">{}</text>"##,
            shown(*cost)
        )?;
        let size = if *size < 100 { size.to_string() } else { shown(*size as f64) };
        writeln!(out, r##"<text x="{cx:.1}" y="{below:.1}" text-anchor="middle" fill="#555">{size}</text>"##)?;
    }
    let (middle, bottom) = ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 10.0);
    writeln!(out, r##"<text x="{middle}" y="{bottom}" text-anchor="middle" fill="#555">{}</text>"##, growth.of)?;
    out.push_str("</svg>\n");
    Ok(out)
}
