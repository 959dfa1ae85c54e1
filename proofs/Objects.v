(** * Objects that a patch cannot hide (core/detections.py, core/hiding.py, defenses/object_seeker.py)

    A detector looks at the image under each mask. Its boxes are merged into those of the unmasked image, of which
    nothing is assumed. Areas are numbers of pixels, of a grid as fine as you like. *)

From Coq Require Import List Bool Arith ZArith Lia.
From PatchCleanser Require Import Images Geometry Cover.
Import ListNotations.

(** ** Merging: a masked box is left out if a box of the result covers it *)

Section Merge.
  Context {box : Type}.
  Variable covered : box -> box -> bool. (* the first by the second *)

  Fixpoint merge (result masked : list box) : list box :=
    match masked with
    | [] => result
    | b :: rest => merge (if existsb (covered b) result then result else result ++ [b]) rest
    end.

  Lemma no_box_is_taken_out : forall masked result c, In c result -> In c (merge result masked).
  Proof.
    induction masked as [|b rest IH]; intros result c Hc; simpl; [assumption|]. apply IH.
    destruct (existsb _ _); [assumption|]. apply in_app_iff. now left.
  Qed.

  Hypothesis a_box_covers_itself : forall b, covered b b = true.

  (** Whatever the base and the other masked boxes are, in every order. *)
  Theorem every_masked_box_is_covered : forall masked base b, In b masked ->
    exists c, In c (merge base masked) /\ covered b c = true.
  Proof.
    induction masked as [|a rest IH]; intros base b Hb; [destruct Hb|]. simpl. destruct Hb as [<-|Hb]; [|now apply IH].
    destruct (existsb (covered a) base) eqn:E.
    - apply existsb_exists in E. destruct E as [c [Hc E]]. exists c.
      split; [now apply no_box_is_taken_out | assumption].
    - exists a. split; [|apply a_box_covers_itself]. apply no_box_is_taken_out, in_app_iff. right. now left.
  Qed.
End Merge.

(** ** What a masked box promises of an object *)

Local Open Scope Z_scope.

Definition area (pixels : list pixel) (P : region pixel) : Z := Z.of_nat (length (filter P pixels)).

Definition both (P Q : region pixel) : region pixel := fun p => P p && Q p.

Lemma area_of_a_part : forall pixels P Q,
  (forall p, P p = true -> Q p = true) -> area pixels P <= area pixels Q.
Proof.
  intros pixels P Q H. unfold area. induction pixels as [|p rest IH]; simpl; [lia|]. specialize (H p).
  destruct (P p); [rewrite H by reflexivity; simpl length; lia | destruct (Q p); simpl length; lia].
Qed.

Lemma a_part_is_inside_or_outside : forall pixels P Q,
  area pixels P = area pixels (both P Q) + area pixels (fun p => P p && negb (Q p)).
Proof.
  intros pixels P Q. unfold area, both. induction pixels as [|p rest IH]; simpl; [reflexivity|].
  destruct (P p), (Q p); simpl length; lia.
Qed.

Section Objects.
  Variable pixels : list pixel.

  (** A class, and the pixels of a box. *)
  Definition box : Type := nat * region pixel.

  (** A box may be left out if another one of its class covers num / den of it. *)
  Variables num den : Z.
  Hypothesis prune_is_a_share : 0 <= num <= den.

  Definition covered (b c : box) : bool :=
    (fst b =? fst c)%nat && (num * area pixels (snd b) <=? den * area pixels (both (snd b) (snd c))).

  (** In units of 1 / den pixels. *)
  Definition promise (object b : box) : Z :=
    if (fst b =? fst object)%nat
    then den * area pixels (both (snd b) (snd object)) - (den - num) * area pixels (snd b) else 0.

  Lemma a_box_covers_itself : forall b, covered b b = true.
  Proof.
    intros [c P]. unfold covered. simpl. rewrite Nat.eqb_refl. apply Z.leb_le.
    replace (area pixels (both P P)) with (area pixels P).
    - assert (0 <= area pixels P) by (unfold area; lia). nia.
    - unfold area, both. do 2 f_equal. apply filter_ext. intro p. now destruct (P p).
  Qed.

  Definition keeps (object : box) (share : Z) (result : list box) : Prop :=
    exists c, In c result /\ fst c = fst object /\ share <= den * area pixels (both (snd c) (snd object)).

  Theorem a_covered_box_keeps_its_promise : forall object b c,
    covered b c = true -> fst b = fst object ->
    fst c = fst object /\ promise object b <= den * area pixels (both (snd c) (snd object)).
  Proof.
    intros [y g] [k b] [k' c] Hcovered E. unfold covered in Hcovered. cbn [fst snd] in *. subst k.
    apply andb_true_iff in Hcovered. destruct Hcovered as [E Hshare].
    apply Nat.eqb_eq in E. apply Z.leb_le in Hshare. split; [congruence|].
    unfold promise. cbn [fst snd]. rewrite Nat.eqb_refl.
    assert (Hb := a_part_is_inside_or_outside pixels b c).
    assert (Hbg := a_part_is_inside_or_outside pixels (both b g) c).
    assert (Hin : area pixels (both (both b g) c) <= area pixels (both c g)).
    { apply area_of_a_part. unfold both. intros p H. apply andb_true_iff in H. destruct H as [H H'].
      apply andb_true_iff in H. now rewrite H', (proj2 H). }
    assert (Hout : area pixels (fun p => both b g p && negb (c p)) <= area pixels (fun p => b p && negb (c p))).
    { apply area_of_a_part. unfold both. intros p H. destruct (b p); [|discriminate]. now destruct (g p), (c p). }
    nia.
  Qed.

  (** ** The certificate, from what the clean image under each mask promises *)

  Definition best (promises : list Z) : Z := fold_right Z.max 0 promises.

  Definition promises (object : box) (detections : list (list box)) : list Z :=
    map (fun boxes => best (map (promise object) boxes)) detections.

  Lemma the_best_is_one_of_them : forall l, best l = 0 \/ In (best l) l.
  Proof.
    induction l as [|a rest IH]; simpl; [now left|]. fold (best rest) in *.
    destruct (Z.max_spec a (best rest)) as [[_ ->]|[_ ->]]; [destruct IH; auto | auto].
  Qed.

  (** At a placement: the best of the masks that hide it. *)
  Definition promised (hiding : list bool) (promises : list Z) : Z :=
    best (map (fun i => if entry hiding i then nth i promises 0 else 0) (seq 0 (length promises))).

  Variable masks : list (list window).

  (** Shapes, with the room in which each may be placed: those over an object, near it, or far from it. *)
  Variable rooms : list (shape * window).
  Hypothesis shapes_are_positive : forall s room, In (s, room) rooms -> (1 <= fst s /\ 1 <= snd s)%nat.

  Definition promises_by_placement (promises : list Z) : list Z :=
    flat_map (fun '(s, room) => map (fun w => promised (hidden_by masks w) promises) (representatives masks s room))
      rooms.

  Context {value : Type}.
  Let mask_regions : list (region pixel) := map region_of masks.
  Variable detections : image pixel value -> table (list box).
  Hypothesis visible : function_of_visible mask_regions detections.
  (** The boxes of the unmasked image are anything, and so is the order in which masked boxes are tried. *)
  Variable base : image pixel value -> list box.
  Variable in_order : list box -> list box.
  Hypothesis every_box_is_tried : forall l b, In b l -> In b (in_order l).

  Definition merged (x : image pixel value) : list box :=
    merge covered (base x) (in_order (concat (one_mask_labels mask_regions detections x))).

  Theorem a_certified_object_keeps_a_box : forall x object share, 0 < share ->
    (forall promise, In promise (promises_by_placement (promises object (one_mask_labels mask_regions detections x))) ->
      share <= promise) ->
    forall s room w, In (s, room) rooms -> placed s room w ->
    forall x', (forall p, region_of [w] p = false -> x' p = x p) -> keeps object share (merged x').
  Proof.
    intros x object share Hpositive Hleast s room w Hroom Hplaced x' Hsame.
    destruct (shapes_are_positive s room Hroom) as [Hh Hw].
    destruct (representatives_stand_for_all_placements masks s room w Hh Hw Hplaced) as [r [Hr Hhides]].
    set (clean := one_mask_labels mask_regions detections x) in *.
    assert (Hnumber : length clean = length masks).
    { unfold clean, one_mask_labels, mask_regions. now rewrite map_length, seq_length, map_length. }
    assert (Hshare : share <= promised (hidden_by masks r) (promises object clean)).
    { apply Hleast, in_flat_map. exists (s, room). split; [assumption|].
      now apply in_map with (f := fun w => promised (hidden_by masks w) _). }
    unfold promised in Hshare.
    match type of Hshare with _ <= best ?l => destruct (the_best_is_one_of_them l) as [E|Hin] end; [lia|].
    apply in_map_iff in Hin. destruct Hin as [i [E Hi]]. rewrite <- E in Hshare. clear E.
    apply in_seq in Hi. unfold promises in Hi. rewrite map_length, Hnumber in Hi.
    destruct (entry (hidden_by masks r) i) eqn:Hentry; [|lia].
    rewrite hidden_by_entry in Hentry by lia. apply Hhides in Hentry; [|apply nth_In; lia].
    apply mask_hides_iff in Hentry.
    unfold promises in Hshare. change 0 with (best (map (promise object) [])) in Hshare.
    rewrite map_nth with (f := fun boxes => best (map (promise object) boxes)) in Hshare.
    match type of Hshare with _ <= best ?l => destruct (the_best_is_one_of_them l) as [E|Hin] end; [lia|].
    apply in_map_iff in Hin. destruct Hin as [b [E Hb]]. rewrite <- E in Hshare. clear E.
    (* The same box is seen under the same mask of the attacked image. *)
    assert (Hregions : length mask_regions = length masks) by (unfold mask_regions; apply map_length).
    assert (Hseen : In b (detections x' i i)).
    { rewrite (hidden_patch_changes_no_answer mask_regions detections visible i i (region_of [w]) x x'); auto.
      - unfold clean in Hb. rewrite one_mask_label_number in Hb; [assumption | rewrite Hregions; lia].
      - unfold mask, mask_regions. rewrite nth_indep with (d' := region_of []) by (rewrite map_length; lia).
        rewrite map_nth. exact Hentry. }
    destruct (every_masked_box_is_covered covered a_box_covers_itself
      (in_order (concat (one_mask_labels mask_regions detections x'))) (base x') b) as [c [Hc Hcovered]].
    { apply every_box_is_tried, in_concat. exists (detections x' i i). split; [|assumption].
      apply every_mask_has_a_label. rewrite Hregions. lia. }
    assert (Hclass : fst b = fst object).
    { unfold promise in Hshare. destruct (Nat.eqb_spec (fst b) (fst object)); [assumption | lia]. }
    destruct (a_covered_box_keeps_its_promise object b c Hcovered Hclass) as [E Hkeeps].
    exists c. repeat split; [assumption | assumption | lia].
  Qed.
End Objects.
